"""Drafts by suffix decoding (arXiv 2411.04975), each with the probability that it is kept."""

from dataclasses import dataclass

import numpy as np
import torch

from app.engine.batch import BatchOutline
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.answer_memory import AnswerMemory
from app.speculative.config import SuffixConfig
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.match_calibration import MatchCalibration
from app.speculative.proposer import Drafts, Verdict
from app.speculative.suffix import Continuations, continue_sequences, endings


@dataclass(frozen=True)
class _Prediction:
    """What each source has found for the sequences of one step."""

    sources: list[tuple[MatchCalibration, Continuations]]
    rows: np.ndarray  # [max_num_seqs] int64: by slot its row in what was found; -1: none, or judged


class SuffixProposer:
    """Looks every drafting sequence up in itself and, where there is a memory, in past answers of its owner.

    The better of both is drafted. What either would have drafted is judged by what the target says.
    """

    def __init__(
        self, state: SequenceState, memory: AnswerMemory | None = None, share_memory_across_keys: bool = False
    ) -> None:
        max_num_seqs = len(state.num_tokens)
        self._memory = memory
        self._owners = np.zeros_like(state.owners) if share_memory_across_keys else state.owners
        self._own = MatchCalibration(max_num_seqs)
        self._remembered = MatchCalibration(max_num_seqs)
        self._predictions: list[_Prediction] = []  # of steps that the target has not judged

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        if self._memory is not None:
            for slot in plan.finished_slots:
                text = state.token_ids[slot, : state.num_tokens[slot]]
                self._memory.remember(text, int(state.num_prompt_tokens[slot]), int(self._owners[slot]))

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        for sequence in plan.admitted:
            self._own.admit(sequence.slot)
            self._remembered.admit(sequence.slot)
        limits = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)
        drafting, width = np.flatnonzero(limits), int(limits.max(initial=0))
        self._forget(np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64))
        drafts = Continuations.none(len(limits), width)
        acceptance = np.zeros((len(limits), width))
        if width:
            slots = np.array([plan.scheduled[i].slot for i in drafting], dtype=np.int64)
            for found, probabilities in self._look_up(state, slots, width):
                better = probabilities.cumprod(axis=1).sum(axis=1) > acceptance[drafting].cumprod(axis=1).sum(axis=1)
                chosen = drafting[better]
                acceptance[chosen] = probabilities[better]
                drafts.token_ids[chosen] = found.token_ids[better]
                drafts.num_tokens[chosen] = np.minimum(found.num_tokens[better], limits[chosen])
        return Drafts(drafts.token_ids, drafts.num_tokens, acceptance=acceptance)

    def observe(self, batch: BatchOutline, hidden_states: torch.Tensor | None, verdict: Verdict) -> None:
        for prediction in self._predictions:
            spoken = np.flatnonzero((prediction.rows[batch.slots] >= 0) & (verdict.num_emitted > 0))
            slots = batch.slots[spoken]
            emitted, num_emitted = verdict.emitted_token_ids[spoken], verdict.num_emitted[spoken]
            for calibration, found in prediction.sources:
                calibration.observe(slots, found, prediction.rows[slots], emitted, num_emitted)
            prediction.rows[batch.slots] = -1

    def reset(self) -> None:
        """What is known of a slot is its record, which a fault does not spoil; the memory may hold its cause."""
        self._predictions = []
        if self._memory is not None:
            self._memory.clear()

    def _forget(self, slots: np.ndarray) -> None:
        """Lets go of what was predicted for `slots` [n]: of other sequences, where it was not judged."""
        for prediction in self._predictions:
            prediction.rows[slots] = -1
        self._predictions = [each for each in self._predictions if (each.rows >= 0).any()]

    def _look_up(self, state: SequenceState, slots: np.ndarray, width: int) -> list[tuple[Continuations, np.ndarray]]:
        """What each source has found for the sequences at `slots`, with the probabilities that it is kept."""
        num_tokens = state.num_tokens[slots]
        sources = [(self._own, continue_sequences(state.token_ids, slots, num_tokens, width))]
        if self._memory is not None:
            suffixes = endings(state.token_ids, slots, num_tokens)
            sources.append((self._remembered, self._memory.look_up(suffixes, self._owners[slots], width)))
        rows = np.full(len(state.num_tokens), -1)
        rows[slots] = np.arange(len(slots))
        self._predictions.append(_Prediction(sources, rows))
        return [(found, calibration.probabilities(slots, found)) for calibration, found in sources]


def load(config: SuffixConfig, target: TargetContext) -> LoadedProposer:
    """Nothing to load: no weights, no KV."""

    def build(context: ProposerContext) -> SuffixProposer:
        memory = AnswerMemory(config.memory_bytes) if config.memory_bytes else None
        return SuffixProposer(context.state, memory, config.share_memory_across_keys)

    return LoadedProposer(kv_specs=[], build=build, soft_drafts=False, states_acceptance=True)
