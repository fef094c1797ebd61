"""What the engine is asked and what it says: requests, deltas while they run, whole outputs at their end."""

from dataclasses import dataclass, field
from typing import Literal

from app.engine.plan import TokenLogprobs
from app.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it, `n` times."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    n: int = 1
    streamed: bool = True  # False: whoever asked waits for the whole answer
    owner: int = field(default=0, repr=False)  # a digest of the client's API key in int64; 0 without one


@dataclass
class SpeculationStats:
    """Counts over the verifications of one sequence (or a sum of sequences).

    `num_steps` counts every step that emitted tokens, drafts or none; `accepted_per_position[j]` the steps
    whose draft j was accepted. Drafts never scheduled are not counted.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Takes one verification into account."""
        assert 0 <= num_accepted <= num_drafted
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        for counts, num in ((self.drafted_per_position, num_drafted), (self.accepted_per_position, num_accepted)):
            counts.extend([0] * (num_drafted - len(counts)))
            for position in range(num):
                counts[position] += 1

    def add(self, other: "SpeculationStats") -> None:
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        for mine, theirs in (
            (self.drafted_per_position, other.drafted_per_position),
            (self.accepted_per_position, other.accepted_per_position),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, num in enumerate(theirs):
                mine[position] += num

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts a draft; 0 where none was made."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted a step, recovered and bonus tokens included; 0 before the first step."""
        return (self.num_accepted + self.num_steps) / self.num_steps if self.num_steps else 0.0


@dataclass
class SequenceDelta:
    """What one step added to choice `index` of a request; the last one carries `finish_reason` and `stats`."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole, once: [num_prompt_tokens], the first is None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that fired; None for EOS
    error: str | None = None  # with finish_reason "error"
    stats: SpeculationStats | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; with the first delta

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, later: "SequenceDelta") -> None:
        """Takes up what a later step added to the same choice."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if later.logprobs:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.stats = later.stats or self.stats
        self.num_cached_tokens += later.num_cached_tokens


@dataclass
class CompletionOutput:
    """One finished choice. `token_ids`, `logprobs` and `text` end at the same token."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    stats: SpeculationStats
    error: str | None = None


@dataclass
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
