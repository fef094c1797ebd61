"""Prompt lookup: proposes what followed the longest earlier occurrence of a sequence's suffix."""

import numpy as np
import torch

from app.engine.batch import BatchOutline
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.config import NgramConfig
from app.speculative.loaded_proposer import LoadedProposer, TargetContext
from app.speculative.proposer import Drafts, Verdict


class NgramProposer:
    """Searches each sequence as it stands in the worker's state, so nothing has to be kept in step with it.

    A search is a few vectorised comparisons over the sequence, tens of microseconds for thousands of tokens.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n
        self._min_n = min_n
        self._max_n = max_n

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Nothing hangs on the last step's tensors."""

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        num_seqs = len(plan.scheduled)
        width = max((scheduled.num_draft_tokens for scheduled in plan.scheduled), default=0)
        token_ids, num_tokens = np.zeros((num_seqs, width), dtype=np.int64), np.zeros(num_seqs, dtype=np.int64)
        for i, scheduled in enumerate(plan.scheduled):
            if scheduled.num_draft_tokens:
                known = state.token_ids[scheduled.slot, : state.num_tokens[scheduled.slot]]
                found = look_up(known, self._min_n, self._max_n, scheduled.num_draft_tokens)
                token_ids[i, : len(found)], num_tokens[i] = found, len(found)
        return Drafts(token_ids[:, : num_tokens.max(initial=0)], num_tokens)

    def observe(self, batch: BatchOutline, hidden_states: torch.Tensor | None, verdict: Verdict) -> None:
        """Nothing to learn: the tokens are in the state."""

    def reset(self) -> None:
        """Nothing to forget."""


def look_up(
    token_ids: np.ndarray,  # [n] int64
    min_n: int,
    max_n: int,
    num_tokens: int,
) -> np.ndarray:
    """At most `num_tokens` tokens that followed an earlier occurrence of the longest suffix that has one.

    Of several occurrences the most recent with that many tokens behind it, since a text's latest turn predicts best
    and a short continuation wastes the pass; else the earliest, which has the most tokens behind it. An occurrence
    may overlap the suffix, so that a text of period p is found p tokens back.
    """
    length = len(token_ids)
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1]) + 1  # index after each earlier suffix of length 1
    best = ends if min_n == 1 else ends[:0]
    for n in range(2, min(max_n, length - 1) + 1):
        ends = ends[ends >= n]
        ends = ends[token_ids[ends - n] == token_ids[length - n]]
        if not len(ends):
            break
        if n >= min_n:
            best = ends
    if not len(best):
        return token_ids[:0]
    whole = best[best + num_tokens <= length]
    start = whole[-1] if len(whole) else best[0]
    return token_ids[start : start + num_tokens]


def load(config: NgramConfig, target: TargetContext) -> LoadedProposer:
    """Lookup has no drafter and no KV."""
    return LoadedProposer([], lambda context: NgramProposer(config.min_n, config.max_n), soft_drafts=False)
