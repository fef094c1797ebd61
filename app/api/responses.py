"""The openai package's response types, with the fields of our extensions."""

from dataclasses import dataclass
from typing import Any, Literal

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk, chat_completion, chat_completion_chunk
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel

from app.engine.outputs import SequenceDelta, SpeculationStats

Finish = Literal["stop", "length", "content_filter"]


@dataclass(frozen=True)
class Envelope:
    """What a response and all chunks of a stream say alike."""

    id: str
    created: int  # Unix time, s
    model: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}


def choice_extensions(delta: SequenceDelta, return_token_ids: bool) -> dict[str, Any]:
    """Fields of a choice that OpenAI's lacks, where there is something to say."""
    fields: dict[str, Any] = {"token_ids": delta.token_ids} if return_token_ids else {}
    return fields if delta.stop_reason is None else fields | {"stop_reason": delta.stop_reason}


class SpeculationMetrics(BaseModel):
    """What speculation did for a request: the sum over its choices."""

    drafted: int
    accepted: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    steps: int
    acceptance_rate: float
    mean_acceptance_length: float

    @classmethod
    def of(cls, stats: SpeculationStats) -> "SpeculationMetrics":
        return cls(
            drafted=stats.num_drafted,
            accepted=stats.num_accepted,
            drafted_per_position=stats.drafted_per_position,
            accepted_per_position=stats.accepted_per_position,
            steps=stats.num_steps,
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
        )


class PromptLogprob(BaseModel):
    """One candidate at a position of the prompt, as vLLM writes it."""

    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class ChatChoice(chat_completion.Choice):
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(ChatCompletion):
    choices: list[ChatChoice]  # type: ignore[assignment]
    prompt_logprobs: PromptLogprobs | None = None
    speculation_metrics: SpeculationMetrics | None = None


class ChatChunkChoice(chat_completion_chunk.Choice):
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(ChatCompletionChunk):
    choices: list[ChatChunkChoice]  # type: ignore[assignment]
    speculation_metrics: SpeculationMetrics | None = None


class TextLogprobs(Logprobs):
    """The first token of an echoed prompt has no logprob."""

    token_logprobs: list[float | None]  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None]  # type: ignore[assignment]


class TextChoice(CompletionChoice):
    """Of whole completions and of chunks, whose `finish_reason` is null until the last."""

    finish_reason: Finish | None  # type: ignore[assignment]
    logprobs: TextLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextResponse(Completion):
    choices: list[TextChoice]  # type: ignore[assignment]
    speculation_metrics: SpeculationMetrics | None = None
