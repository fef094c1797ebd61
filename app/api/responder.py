"""From an engine's deltas to the body of a response, whole or as a stream."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from app.api.errors import APIError, EngineUnavailableError
from app.api.responses import SpeculationMetrics
from app.api.sse import DONE, encode_event
from app.engine.outputs import SequenceDelta, SpeculationStats


class ChoiceFormat(Protocol):
    """In what chat and plain completions differ. `prompt` counts the prompts of the request from 0."""

    def choice(self, index: int, prompt: int, whole: SequenceDelta) -> BaseModel: ...
    def response(self, choices: list[Any], fields: dict[str, Any]) -> BaseModel: ...
    def chunk_choice(self, index: int, prompt: int, delta: SequenceDelta, is_first: bool) -> BaseModel: ...
    def chunk(self, choices: list[Any], fields: dict[str, Any]) -> BaseModel: ...


@dataclass(frozen=True)
class ResponseOptions:
    n: int
    include_usage: bool  # in a stream; a whole response always has it
    include_speculation_metrics: bool
    sends_tokens: bool  # logprobs or ids: a chunk is worth sending although its text is held back


class Responder:
    """Joins the choices of one request's prompts; choice i of prompt p has the index p * n + i."""

    def __init__(self, choice_format: ChoiceFormat, nums_prompt_tokens: list[int], options: ResponseOptions) -> None:
        self._format = choice_format
        self._options = options
        self._num_prompt_tokens = sum(nums_prompt_tokens)
        self._num_choices = len(nums_prompt_tokens) * options.n
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._num_finished = 0
        self._stats = SpeculationStats()
        self._started: set[int] = set()
        self._wholes: dict[int, SequenceDelta] = {}

    def events(self, prompt: int, deltas: list[SequenceDelta]) -> bytes:
        """The chunks of one step, one a choice.

        Raises APIError where the engine gave up a choice.
        """
        return b"".join(self._event(prompt, delta) for delta in deltas)

    def last_events(self) -> bytes:
        """What follows the last step."""
        self._assert_finished()
        if not self._options.include_usage:
            return DONE
        fields = {"usage": self._usage(), **self._metrics()}
        return encode_event(self._format.chunk([], fields)) + DONE

    def add(self, prompt: int, deltas: list[SequenceDelta]) -> None:
        """Keeps the deltas of one step for `body`.

        Raises APIError where the engine gave up a choice.
        """
        for delta in deltas:
            self._count(delta)
            index = prompt * self._options.n + delta.index
            if index in self._wholes:
                self._wholes[index].append(delta)
            else:
                self._wholes[index] = replace(
                    delta,
                    token_ids=list(delta.token_ids),
                    logprobs=None if delta.logprobs is None else list(delta.logprobs),
                )

    def body(self) -> bytes:
        """The whole response, as JSON."""
        self._assert_finished()
        choices = [
            self._format.choice(index, index // self._options.n, whole) for index, whole in sorted(self._wholes.items())
        ]
        response = self._format.response(choices, {"usage": self._usage(), **self._metrics()})
        return response.model_dump_json(exclude_unset=True).encode()

    def _event(self, prompt: int, delta: SequenceDelta) -> bytes:
        self._count(delta)
        options = self._options
        index = prompt * options.n + delta.index
        is_first = index not in self._started
        if not (is_first or delta.text or delta.finished or (options.sends_tokens and delta.token_ids)):
            return b""
        self._started.add(index)
        fields: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if self._num_finished == self._num_choices and not options.include_usage:
            fields |= self._metrics()  # nothing but [DONE] follows
        return encode_event(self._format.chunk([self._format.chunk_choice(index, prompt, delta, is_first)], fields))

    def _count(self, delta: SequenceDelta) -> None:
        if delta.finish_reason == "error":
            message = delta.error or "The engine gave up this request."
            raise APIError(500, message, error_type="server_error", code="engine_error")
        if delta.finish_reason == "abort":
            raise EngineUnavailableError("the engine gave up this request before its end")
        self._num_completion_tokens += len(delta.token_ids)
        if delta.index == 0:  # its siblings find the prompt that it has computed
            self._num_cached_tokens += delta.num_cached_tokens
        if delta.finished:
            self._num_finished += 1
            self._stats.add(delta.stats or SpeculationStats())

    def _usage(self) -> CompletionUsage:
        return CompletionUsage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
        )

    def _metrics(self) -> dict[str, Any]:
        if not self._options.include_speculation_metrics:
            return {}
        return {"speculation_metrics": SpeculationMetrics.of(self._stats)}

    def _assert_finished(self) -> None:
        assert self._num_finished == self._num_choices, (
            f"the engine ended the stream with {self._num_finished} of {self._num_choices} choices finished"
        )
