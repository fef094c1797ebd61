"""An engine client that plays a script instead of running a model."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace

from app.engine.outputs import FinishReason, GenerationRequest, SequenceDelta, SpeculationStats
from app.engine.plan import TokenLogprobs

Step = list[SequenceDelta] | BaseException | asyncio.Event
"""Deltas to send, an exception to raise, or an event to wait for."""

Script = Callable[[GenerationRequest], Iterable[Step]]


class ScriptedClient:
    """Plays `script(request)`; keeps the requests that came, and which of them were closed before their end."""

    def __init__(self, script: Script, health: BaseException | None = None) -> None:
        self._script = script
        self._health = health
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.num_open = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        self.requests.append(request)
        self.num_open += 1
        finished = False
        try:
            for step in self._script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    await asyncio.sleep(0)
                    yield [replace(delta, request_id=request.request_id) for delta in step]
            finished = True
        finally:
            self.num_open -= 1
            if not finished:
                self.aborted.append(request.request_id)

    async def check_health(self) -> None:
        if self._health is not None:
            raise self._health


def delta(
    text: str,
    token_ids: list[int],
    *,
    index: int = 0,
    finish: FinishReason | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
    stats: SpeculationStats | None = None,
    cached: int = 0,
    stop_reason: str | int | None = None,
    error: str | None = None,
) -> SequenceDelta:
    """A delta of the request that is being played."""
    if finish is not None and stats is None:
        stats = SpeculationStats()
    return SequenceDelta(
        request_id="",
        index=index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish,
        stop_reason=stop_reason,
        error=error,
        stats=stats,
        num_cached_tokens=cached,
    )


def logprob(
    token_id: int, value: float = -0.5, top: tuple[tuple[int, float], ...] = (), rank: int = 1
) -> TokenLogprobs:
    return TokenLogprobs(token_id, value, rank, list(top))


def speculation_stats(*verifications: tuple[int, int]) -> SpeculationStats:
    """Of (drafted, accepted) pairs, one a step."""
    stats = SpeculationStats()
    for num_drafted, num_accepted in verifications:
        stats.count(num_drafted, num_accepted)
    return stats
