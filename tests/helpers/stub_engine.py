"""An engine that says what it is told to, for the layers around it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from app.engine.outputs import GenerationRequest, SequenceDelta
from app.serve.messages import ModelDescription
from app.serve.metric_table import REFUSALS

IDLE_STATS: dict[str, Any] = {
    **dict.fromkeys(
        [
            *("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_finished", "num_failed", "num_aborted"),
            *("num_running", "num_waiting", "num_waiting_tokens", "num_preemptions", "kv_usage"),
            *("num_prefix_hit_tokens", "num_prefix_queried_tokens"),
            *("schedule_s", "propose_s", "forward_s", "verify_s", "commit_s", "update_s"),
            *("num_speculative_tokens", "num_drafted", "num_accepted", "num_verifications"),
            *("num_drafter_faults", "num_drafter_restarts"),
            *(f"num_refused_{reason}" for reason in REFUSALS),
        ],
        0,
    ),
    "accepted_per_position": [],
    "drafted_per_position": [],
}


class StubEngine:
    """One token a choice and step, `step_s` apart, until `max_tokens`; `steps_allowed` holds the steps back."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.steps_allowed = asyncio.Event()
        self.steps_allowed.set()
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.num_speculative_tokens = 4
        self.failure: Exception | None = None  # of the engine, for good
        self.stop_reason: Exception | None = None
        self.refusal: Exception | None = None  # of requests
        self.was_shut_down = False
        self.counts: dict[str, Any] = dict(IDLE_STATS)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        if (error := self.failure or self.refusal) is not None:
            raise error
        self.open.add(request.request_id)
        num_tokens = request.sampling_params.max_tokens or 16
        finished = False
        try:
            for step in range(num_tokens):
                await asyncio.sleep(self.step_s)
                await self.steps_allowed.wait()
                finished = step == num_tokens - 1
                yield [
                    SequenceDelta(
                        request.request_id, index, f"{step} ", [step], finish_reason="length" * finished or None
                    )
                    for index in range(request.n)
                ]
        finally:
            self.open.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    async def stats(self) -> dict[str, Any]:
        return {**self.counts, "num_running": len(self.open)}

    async def set_num_speculative_tokens(self, num: int) -> None:
        self.num_speculative_tokens = num

    def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    def shutdown(self) -> None:
        self.was_shut_down = True


def factory_of(engine: StubEngine) -> Any:
    """What a TargetReplica calls to load its engine."""

    async def load(_: object) -> tuple[StubEngine, ModelDescription]:
        return engine, ModelDescription(Path("nowhere"), max_model_len=64, vocab_size=100)

    return load
