"""Runs workloads through an engine and counts what it did."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine

PHASES = ("schedule", "propose", "forward", "verify", "commit", "update")

COUNTS = (
    "num_steps",
    "num_verifications",
    "num_drafted",
    "drafted_per_position",
    "accepted_per_position",
    *(f"{phase}_s" for phase in PHASES),
)

Stats = dict[str, Any]  # numbers, and lists of counts by position


@dataclass
class EngineRun:
    """One pass over a workload's waves.

    The decode figures cover the time from when the last stream of a wave had its first token, so that no
    prompt is computed in them.
    """

    token_ids: list[list[int]] = field(default_factory=list)  # a prompt, in order
    first_token_s: list[float] = field(default_factory=list)  # a prompt, from the wave's start
    wall_s: float = 0.0
    decode_s: float = 0.0
    num_decode_tokens: int = 0
    counts: Stats = field(default_factory=dict)  # COUNTS of the engine's stats, over the decode time

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """Prompts included."""
        return self.num_tokens / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def num_steps(self) -> int:
        return self.counts["num_steps"]

    @property
    def num_verifications(self) -> int:
        """Sequences over steps: each step of a sequence counts, with drafts or without."""
        return self.counts["num_verifications"]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a sequence and step; 1 without drafts."""
        return self.num_decode_tokens / self.num_verifications if self.num_verifications else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at each position that were accepted."""
        pairs = zip(self.counts["accepted_per_position"], self.counts["drafted_per_position"], strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def step_ms(self) -> dict[str, float]:
        """Milliseconds a decode step by phase; `other` is what the phases leave of the wall-clock time."""
        num_steps = max(self.num_steps, 1)
        phases = {name: 1e3 * self.counts[f"{name}_s"] / num_steps for name in PHASES}
        total = 1e3 * self.decode_s / num_steps
        return {**phases, "other": total - sum(phases.values()), "total": total}


class EngineRunner:
    """Drives one engine step by step; every request is greedy and goes on past the end of the text."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._request_numbers = itertools.count()

    def run(self, waves: Iterable[list[list[int]]], num_new_tokens: int) -> EngineRun:
        run = EngineRun()
        for prompts in waves:
            self._run_wave(run, prompts, num_new_tokens)
        return run

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from a prompt's arrival at an idle engine to its first token."""
        return self.run([[prompt]], num_new_tokens=1).first_token_s[0]

    def _run_wave(self, run: EngineRun, prompts: list[list[int]], num_new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        outputs: dict[str, list[int]] = {}
        start = time.perf_counter()
        for prompt in prompts:
            request_id = f"bench-{next(self._request_numbers)}"
            self.engine.add_request(GenerationRequest(request_id, prompt, params))
            outputs[request_id] = []
        first_token_s: dict[str, float] = {}
        decode_start, before, num_before = start, self.engine.stats(), 0
        while self.engine.has_work:
            deltas = self.engine.step()
            now = time.perf_counter()
            for delta in deltas:
                assert delta.error is None, delta.error
                if delta.token_ids:
                    first_token_s.setdefault(delta.request_id, now - start)
                outputs[delta.request_id].extend(delta.token_ids)
            if num_before == 0 and len(first_token_s) == len(prompts):
                decode_start, before = now, self.engine.stats()
                num_before = sum(map(len, outputs.values()))
        end = time.perf_counter()
        run.wall_s += end - start
        run.decode_s += end - decode_start
        run.num_decode_tokens += sum(map(len, outputs.values())) - num_before
        run.counts = _sum(run.counts, difference(self.engine.stats(), before))
        run.first_token_s.extend(first_token_s[request_id] for request_id in outputs)
        run.token_ids.extend(outputs.values())


def difference(after: Stats, before: Stats) -> Stats:
    """What was counted between two looks at an engine's stats; lists may have grown."""
    return {name: _combine(after[name], before[name], -1) for name in COUNTS}


def _sum(counts: Stats, others: Stats) -> Stats:
    return {name: _combine(others[name], counts[name], 1) for name in COUNTS} if counts else others


def _combine(value: Any, other: Any, sign: int) -> Any:
    if isinstance(value, list):
        return [a + sign * b for a, b in itertools.zip_longest(value, other, fillvalue=0)]
    return value + sign * other
