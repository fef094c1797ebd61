"""Every error in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import fields

from starlette.responses import Response

from app.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# What the engine calls a parameter, and what the body calls it.
_BODY_NAMES = {field.name: field.name for field in fields(SamplingParams)} | {
    "bad_words": "bad_words",
    "bad_words_token_ids": "bad_words",
    "num_speculative_tokens": "speculative.num_speculative_tokens",
    "n": "n",
}
_NAMED_FIELD = re.compile(r"(\w+)(?:\[[^\]]*\])? (?:is|names) ")


class APIError(Exception):
    """An answer that is an error. `param` is the body's field at fault, as a path: messages[0].role."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """JSON in UTF-8, whatever the message quotes: a lone surrogate becomes the text of its escape."""
        message = self.message.encode("utf-8", "backslashreplace").decode()
        error = {"message": message, "type": self.error_type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, media_type="application/json")


class QueueFullError(RuntimeError):
    """The engine has as many requests waiting as it will hold."""

    def __init__(self, message: str = "the queue is full: try again later", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type["QueueFullError"], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class EngineUnavailableError(RuntimeError):
    """No engine is there to answer, or it is going away."""


def as_api_error(error: BaseException, request_id: str) -> APIError:
    """What a client is told of `error`. Faults of ours are logged with their traceback, which stays here."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(
            429,
            str(error),
            error_type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
        )
    if isinstance(error, EngineUnavailableError):
        logger.warning("request %s: no engine: %s", request_id, error)
        message = f"The model cannot answer at the moment: {error or 'no engine is running'}"
        return APIError(503, message, error_type="server_error", code="service_unavailable")
    logger.error("request %s failed", request_id, exc_info=error)
    message = f"The server failed while it processed this request; its log has the cause under request id {request_id}."
    return APIError(500, message, error_type="server_error", code="internal_error")


def refusal(error: ValueError) -> APIError:
    """A request that the engine, or SamplingParams, refuses: the message names the field and the remedy."""
    return APIError(400, str(error), param=_named_parameter(str(error)))


def _named_parameter(message: str) -> str | None:
    """The body's field that an engine's message begins with, as in `top_p is 0: use …`."""
    match = _NAMED_FIELD.match(message)
    return _BODY_NAMES.get(match[1]) if match else None


def context_length_error(
    num_prompt_tokens: int, num_new_tokens: int, max_model_len: int, param: str, *, at_least: bool = False
) -> APIError:
    """A prompt that leaves no room for `num_new_tokens`; `at_least` where it has that many tokens or more."""
    about = "at least " if at_least else ""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {about}"
        f"{num_prompt_tokens + num_new_tokens} tokens ({num_prompt_tokens} in the {param}, {num_new_tokens} in the "
        f"completion). Please reduce the length of the {param} or of the completion."
    )
    return APIError(400, message, param=param, code="context_length_exceeded")
