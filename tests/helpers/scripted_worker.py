"""A worker without a model: next tokens and drafts come from functions, in microseconds."""

from collections.abc import Callable

import numpy as np

from app.engine.plan import ScheduledSequence, SequenceResult, StepPlan, StepResult, StepTimings, TokenLogprobs
from app.engine.sequence_state import SequenceState

History = list[int]


class ScriptedWorker:
    """Executes plans against a real `SequenceState`, greedily, and checks every step.

    `next_token` is the target: the token that follows a history. `draft` proposes up to n tokens after
    a history. What stands in a KV slot is the hash of the tokens up to it, so a step that reads a slot
    which was never written, belongs to another sequence or holds a rejected draft fails an assertion.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        next_token: Callable[[History], int],
        draft: Callable[[History, int], list[int]] = lambda history, num: [],
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.state = SequenceState(max_num_seqs, max_model_len, block_size)
        self.next_token = next_token
        self.draft = draft
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_rows = 0  # over all steps
        self._kv: dict[int, int] = {}  # slot of the KV pool: hash of the tokens up to it

    @property
    def occupied_slots(self) -> set[int]:
        return {slot for slot, params in enumerate(self.state.sampling_params) if params is not None}

    def step(self, plan: StepPlan) -> StepResult:
        assert plan.scheduled, "a step without work"
        self.state.apply(plan)
        slots = [scheduled.slot for scheduled in plan.scheduled]
        assert len(set(slots)) == len(slots)
        num_rows = sum(scheduled.num_new_tokens + scheduled.num_draft_tokens for scheduled in plan.scheduled)
        assert self.max_num_batched_tokens is None or num_rows <= self.max_num_batched_tokens
        self.num_rows += num_rows
        self._check_blocks()
        results = [self._run(scheduled) for scheduled in plan.scheduled]
        return StepResult(plan.step_id, results, StepTimings(num_rows=num_rows))

    def _run(self, scheduled: ScheduledSequence) -> SequenceResult:
        state, slot = self.state, scheduled.slot
        params = state.sampling_params[slot]
        assert params is not None
        num_tokens, start = int(state.num_tokens[slot]), int(state.num_computed_tokens[slot])
        end = start + scheduled.num_new_tokens
        history = state.token_ids[slot, :num_tokens].tolist()
        assert scheduled.num_new_tokens >= 1
        assert end <= num_tokens
        samples = end == num_tokens
        assert samples or scheduled.num_draft_tokens == 0, "drafts within a prompt"
        drafts = self.draft(history, scheduled.num_draft_tokens) if samples else []
        assert len(drafts) <= scheduled.num_draft_tokens
        assert num_tokens + scheduled.num_draft_tokens + 1 <= state.max_model_len or not samples

        self._check_context(slot, history, start)
        self._write(slot, history + drafts, start, end + len(drafts))
        emitted = self._verify(history, drafts) if samples else []
        self.state.commit(slot, scheduled.num_new_tokens, np.array(emitted, dtype=np.int64))
        logprobs, prompt_logprobs = None, None
        if params.logprobs is not None and emitted:
            logprobs = [self._logprob(token_id) for token_id in emitted]
        if params.prompt_logprobs is not None:
            seen = history[start + 1 : min(end + 1, int(state.num_prompt_tokens[slot]))]
            prompt_logprobs = [self._logprob(token_id) for token_id in seen] or None
        return SequenceResult(slot, emitted, len(drafts), max(len(emitted) - 1, 0), logprobs, prompt_logprobs)

    def _verify(self, history: History, drafts: list[int]) -> list[int]:
        emitted: list[int] = []
        for draft in drafts:
            emitted.append(self.next_token(history + emitted))
            if emitted[-1] != draft:
                return emitted
        return [*emitted, self.next_token(history + emitted)]

    def _logprob(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -1.0 - token_id, 1, [(token_id, -1.0 - token_id)])

    def _kv_slots(self, slot: int, num: int) -> list[int]:
        num_held = int(self.state.num_blocks[slot]) * self.state.block_size
        assert num <= num_held, f"slot {slot}: {num} positions in blocks for {num_held}"
        positions = np.arange(num)
        return self.state.slot_mapping(np.full(num, slot), positions).tolist()

    def _check_context(self, slot: int, history: History, num_computed: int) -> None:
        for kv_slot, key in zip(self._kv_slots(slot, num_computed), prefix_hashes(history), strict=False):
            assert self._kv.get(kv_slot) == key, f"slot {slot}: foreign KV"

    def _write(self, slot: int, token_ids: History, start: int, end: int) -> None:
        hashes = prefix_hashes(token_ids)
        for kv_slot, key in list(zip(self._kv_slots(slot, end), hashes, strict=False))[start:end]:
            self._kv[kv_slot] = key

    def _check_blocks(self) -> None:
        """No block that a sequence will write is held by another."""
        written: list[int] = []
        held: list[set[int]] = []
        for slot in self.occupied_slots:
            blocks = self.state.block_table[slot, : self.state.num_blocks[slot]].tolist()
            assert len(set(blocks)) == len(blocks)
            first = int(self.state.num_computed_tokens[slot]) // self.state.block_size
            written += blocks[first:]
            held.append(set(blocks))
        for block in written:
            assert sum(block in blocks for blocks in held) == 1, f"block {block} is written and shared"


def prefix_hashes(token_ids: History) -> list[int]:
    """Hash of each prefix, the first token's to the last's."""
    hashes, key = [], 0
    for token_id in token_ids:
        key = hash((key, token_id))
        hashes.append(key)
    return hashes
