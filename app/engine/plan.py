"""The two messages of a step: what the scheduler asks of every rank, and what rank 0 answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class AdmittedSequence:
    """A sequence that takes a slot in this step; after a preemption, with what it had emitted."""

    slot: int
    token_ids: list[int]  # prompt, then the tokens emitted before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache; their blocks lead `block_ids`
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # the request's, or the one drawn at admission; 0 <= seed < 2**64
    stop_token_ids: tuple[int, ...]  # ends of run that `min_tokens` holds back: EOS and the request's own
    owner: int = 0  # whose request it is: a digest of its API key in int64; 0 without one


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's share of this step: tokens to compute, and drafts it has room for."""

    slot: int
    num_new_tokens: int  # known tokens to compute: a prompt chunk, or 1
    num_draft_tokens: int  # at most so many drafts, verified in this step; blocks for them are allocated
    new_block_ids: list[int]  # appended to the slot's block table before the step


@dataclass(frozen=True)
class StepPlan:
    """Released slots first, then admissions, then the batch, in the order of `scheduled`."""

    step_id: int
    scheduled: list[ScheduledSequence]
    admitted: list[AdmittedSequence] = field(default_factory=list)
    released_slots: list[int] = field(default_factory=list)
    finished_slots: list[int] = field(default_factory=list)  # those released whose sequences will not come back
    given_up_slots: list[int] = field(default_factory=list)  # the controller's: no drafts for these sequences any more
    drafts: Any = None  # on their way from a draft actor, in a form that its proposer on rank 0 knows to open

    @property
    def num_draft_tokens(self) -> int:
        return sum(scheduled.num_draft_tokens for scheduled in self.scheduled)

    def with_draft_lengths(self, lengths: Sequence[int]) -> "StepPlan":
        """The same step with so many drafts at most, in the order of `scheduled`."""
        scheduled = [
            each if each.num_draft_tokens == length else replace(each, num_draft_tokens=length)
            for each, length in zip(self.scheduled, lengths, strict=True)
        ]
        return replace(self, scheduled=scheduled)


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs at one position, before any processing of the logits."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: list[tuple[int, float]]  # most likely first


@dataclass(frozen=True)
class SequenceResult:
    """What a scheduled sequence emitted: nothing while its prompt is unfinished or when it failed."""

    slot: int
    token_ids: list[int]  # accepted drafts, then one recovered or bonus token
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None  # one an emitted token, where asked
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt tokens whose logits this step computed
    error: str | None = None  # e.g. NaN logits: the request ends with this message


@dataclass
class StepTimings:
    """Seconds by phase. `propose_s` includes the drafter's catch-up."""

    propose_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    num_rows: int = 0


@dataclass(frozen=True)
class StepResult:
    step_id: int
    sequences: list[SequenceResult]  # in the order of the plan's `scheduled`
    timings: StepTimings
    drafter_fault: str | None = None  # traceback of a proposer that raised: the step went on without drafts
    blind_block_ids: Sequence[int] = ()  # hit by the plan's admissions: cached blocks that keep them from drafting
