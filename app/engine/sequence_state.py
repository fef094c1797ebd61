"""What a worker knows of the sequences in its slots."""

import numpy as np

from app.engine.plan import AdmittedSequence, StepPlan
from app.engine.sampling_params import SamplingParams


class SequenceState:
    """Per-slot state as a struct of arrays; every array's first dimension is the slot.

    Lengths and ids are host arrays: a batch is laid out by a few vectorised lines and travels to the
    device in one copy. In every occupied slot `0 <= num_computed_tokens < num_tokens <= max_model_len`
    holds between steps; `admit`, `release` and `commit` are the only writers.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self.owners = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling_params: list[SamplingParams | None] = [None] * max_num_seqs
        self.stop_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs

    def apply(self, plan: StepPlan) -> None:
        """Brings the slots to where the plan's batch starts: releases, admissions, new blocks."""
        for slot in plan.released_slots:
            self.release(slot)
        for sequence in plan.admitted:
            self.admit(sequence)
        for scheduled in plan.scheduled:
            if scheduled.new_block_ids:
                self._append_blocks(scheduled.slot, scheduled.new_block_ids)

    def admit(self, sequence: AdmittedSequence) -> None:
        slot, num_tokens = sequence.slot, len(sequence.token_ids)
        assert self.sampling_params[slot] is None, f"slot {slot} is occupied"
        assert 0 <= sequence.num_computed_tokens < num_tokens <= self.max_model_len
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.num_computed_tokens[slot] = sequence.num_computed_tokens
        self.num_blocks[slot] = 0
        self._append_blocks(slot, sequence.block_ids)
        self.seeds[slot] = sequence.seed
        self.owners[slot] = sequence.owner
        self.sampling_params[slot] = sequence.sampling_params
        self.stop_token_ids[slot] = sequence.stop_token_ids

    def release(self, slot: int) -> None:
        assert self.sampling_params[slot] is not None, f"slot {slot} is free already"
        self.sampling_params[slot] = None
        self.stop_token_ids[slot] = ()
        self.num_tokens[slot] = self.num_computed_tokens[slot] = self.num_blocks[slot] = 0
        self.block_table[slot] = 0

    def commit(self, slot: int, num_new_tokens: int, emitted_token_ids: np.ndarray) -> None:
        """Moves a slot past a step that computed `num_new_tokens` known tokens and emitted some.

        Of the drafts' rows those of accepted drafts count as computed; the rejected ones' KV stays
        behind `num_computed_tokens` and is written over.
        """
        num_emitted = len(emitted_token_ids)
        end = self.num_tokens[slot] + num_emitted
        assert end <= self.max_model_len, f"slot {slot}: {end} tokens in a context of {self.max_model_len}"
        self.token_ids[slot, self.num_tokens[slot] : end] = emitted_token_ids
        self.num_tokens[slot] = end
        self.num_computed_tokens[slot] += num_new_tokens + max(num_emitted - 1, 0)

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV slots of `positions` [n] in the sequences at `slots` [n]; int64 [n]."""
        blocks = self.block_table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        start = self.num_blocks[slot]
        self.block_table[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] = start + len(block_ids)
