"""How far a drafter's KV reaches, on block tables that the target's needs alone decide."""

import numpy as np

from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState


class DrafterKV:
    """Per slot the length of the valid prefix, per block whether the drafter has computed all of it.

    The target's prefix cache hands out blocks that the drafter may never have seen: it was off, behind, or forgot.
    A hit counts for the drafter only as far as its own KV is whole. Every plan must be applied, or `reset` called.
    """

    def __init__(self, state: SequenceState, num_blocks: int) -> None:
        self._state = state
        self._is_whole = np.zeros(num_blocks, dtype=bool)
        self.num_computed_tokens = np.zeros(len(state.num_tokens), dtype=np.int64)  # <= state.num_tokens

    def apply(self, plan: StepPlan) -> None:
        """Takes note of blocks handed out anew, and finds what admitted sequences have to start from."""
        block_size = self._state.block_size
        for scheduled in plan.scheduled:
            self._is_whole[scheduled.new_block_ids] = False
        for admitted in plan.admitted:
            self._is_whole[admitted.block_ids[admitted.num_computed_tokens // block_size :]] = False
        for admitted in plan.admitted:
            hits = self._is_whole[admitted.block_ids[: admitted.num_computed_tokens // block_size]]
            self.num_computed_tokens[admitted.slot] = np.logical_and.accumulate(hits).sum() * block_size

    def lacking(self, block_ids: list[int]) -> list[int]:
        """Those of the blocks that are not whole."""
        return [block for block in block_ids if not self._is_whole[block]]

    def extend(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """The next `num_tokens` [n] of the sequences at `slots` [n] are computed, and known."""
        starts = self.num_computed_tokens[slots]
        ends = starts + num_tokens
        self.num_computed_tokens[slots] = ends
        first, last = starts // self._state.block_size, ends // self._state.block_size
        for i in np.flatnonzero(last > first):
            self._is_whole[self._state.block_table[slots[i], first[i] : last[i]]] = True

    def truncate(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """At most `num_tokens` [n] count as computed."""
        self.num_computed_tokens[slots] = np.minimum(self.num_computed_tokens[slots], num_tokens)

    def reset(self) -> None:
        self.num_computed_tokens[:] = 0
        self._is_whole[:] = False
