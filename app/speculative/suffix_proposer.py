"""Drafts by suffix decoding (arXiv 2411.04975), each with the probability that it is kept."""

import numpy as np
import torch

from app.engine.batch import Batch
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.config import SuffixConfig
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.match_calibration import MatchCalibration
from app.speculative.proposer import Drafts, Verdict
from app.speculative.suffix import NOTHING, Continuation, continue_suffix, occurrences


class SuffixProposer:
    """Looks every drafting sequence up in itself. What it would have drafted is judged by what the target says."""

    def __init__(self, state: SequenceState) -> None:
        self._state = state
        self._calibration = MatchCalibration(len(state.num_tokens))
        self._predicted: dict[int, Continuation] = {}  # by slot, of this step

    def catch_up(self, state: SequenceState) -> None:
        """Nothing hangs on the last step's tensors."""

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        for sequence in plan.admitted:
            self._calibration.admit(sequence.slot)
        depth = max((scheduled.num_draft_tokens for scheduled in plan.scheduled), default=0)
        token_ids = np.zeros((len(plan.scheduled), depth), dtype=np.int64)
        acceptance = np.zeros((len(plan.scheduled), depth))
        num_tokens = np.zeros(len(plan.scheduled), dtype=np.int64)
        self._predicted = {}
        for i, scheduled in enumerate(plan.scheduled):
            if not scheduled.num_draft_tokens:
                continue
            draft = self._look_up(scheduled.slot, scheduled.num_draft_tokens)
            num_tokens[i] = num = len(draft.token_ids)
            if num:
                token_ids[i, :num] = draft.token_ids
                acceptance[i, :num] = self._calibration.probabilities(scheduled.slot, draft)
                self._predicted[scheduled.slot] = draft
        return Drafts(token_ids, num_tokens, acceptance=acceptance)

    def observe(self, batch: Batch, hidden_states: torch.Tensor, verdict: Verdict) -> None:
        for i, slot in enumerate(batch.slots.tolist()):
            draft, num_emitted = self._predicted.get(slot), int(verdict.num_emitted[i])
            if draft is None or not num_emitted:
                continue
            # Drafts beyond what was emitted were not judged: the run ended before them.
            num = min(len(draft.token_ids), num_emitted)
            agrees = draft.token_ids[:num] == verdict.emitted_token_ids[i, :num]
            num_kept = num if agrees.all() else int(np.argmin(agrees))
            self._calibration.observe(slot, draft.first(num), num_kept)

    def reset(self) -> None:
        """Nothing of a slot is kept from step to step but its record, which a fault does not spoil."""
        self._predicted = {}

    def _look_up(self, slot: int, num_tokens: int) -> Continuation:
        text = self._state.token_ids[slot, : self._state.num_tokens[slot]]
        ends = occurrences(text)
        return continue_suffix(text, ends, text, num_tokens) if len(ends) else NOTHING


def load(config: SuffixConfig, target: TargetContext) -> LoadedProposer:
    """Nothing to load: no weights, no KV."""

    def build(context: ProposerContext) -> SuffixProposer:
        return SuffixProposer(context.state)

    return LoadedProposer(kv_specs=[], build=build, soft_drafts=False, states_acceptance=True)
