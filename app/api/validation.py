"""From the bytes of a body to a request, or to an error that names the field at fault."""

import reprlib
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from app.api.errors import APIError
from app.api.protocol import GenerationBody

Request = TypeVar("Request", bound=GenerationBody)

# Bounded in every direction: a body may be megabytes, its error shall not.
_quotation = reprlib.Repr()
_quotation.maxstring = _quotation.maxother = 80


def parse_body(request_type: type[Request], body: bytes) -> Request:
    """Raises APIError 400 for what is not JSON, not an object, or not a request."""
    try:
        data = pydantic_core.from_json(body)
    except ValueError as error:
        message = f"We could not parse the JSON body of your request: {error}. Expected a JSON object in UTF-8."
        raise APIError(400, message) from None
    if not isinstance(data, dict):
        raise APIError(400, f"The body of your request is {_quoted(data)}: expected a JSON object.")
    if data.get("model") is None:
        raise APIError(400, "You must provide a model parameter.", param="model")
    _refuse_unknown(request_type, data)
    try:
        request = request_type.model_validate(data)
    except ValidationError as error:
        raise _as_api_error(error, data) from None
    request.check()
    return request


def _refuse_unknown(request_type: type[Request], data: dict[str, Any]) -> None:
    unknown = [name for name in data if name not in request_type.model_fields]
    if unknown:
        plural = "s" if len(unknown) > 1 else ""
        raise APIError(400, f"Unrecognized request argument{plural} supplied: {', '.join(unknown)}", param=unknown[0])


def _as_api_error(error: ValidationError, data: dict[str, Any]) -> APIError:
    """The first field at fault, with what each alternative of its type expected."""
    details = error.errors(include_url=False, include_context=False)
    first = details[0]
    param = _path(first["loc"], data)
    if first["type"] == "missing":
        return APIError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return APIError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    expected = " or ".join(
        dict.fromkeys(_sentence(detail["msg"]) for detail in details if _path(detail["loc"], data) == param)
    )
    return APIError(
        400, f"Invalid value for '{param}', {_quoted(first['input'])}: {expected}.", param=param, code="invalid_value"
    )


def _path(location: tuple[int | str, ...], data: Any) -> str:
    """`messages[0].content`: the parts of pydantic's location that lie in the body, not in our types.

    The last part is taken in any case where the body has none of that name: it is the missing field's.
    """
    path = ""
    for part in location:
        if isinstance(data, dict) and (part in data or part is location[-1]):
            path += f".{part}" if path else str(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path += f"[{part}]"
            data = data[part]
    return path


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _quoted(value: Any) -> str:
    return _quotation.repr(value)
