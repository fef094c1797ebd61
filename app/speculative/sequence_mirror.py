"""What a rank knows of its sequences, followed from afar by plans and their results."""

from dataclasses import dataclass, replace

import numpy as np

from app.engine.batch import BatchOutline
from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan, StepResult
from app.engine.sequence_state import SequenceState
from app.speculative.proposer import Verdict

Shares = dict[int, dict[int, ScheduledSequence]]
"""Of the plans whose results are due, by step, then by slot."""


@dataclass(frozen=True)
class MirrorImage:
    """All that a mirror knows, to be sent to another."""

    sequences: list[AdmittedSequence]
    due: Shares


class SequenceMirror:
    """The state of a rank's slots, for those who see every plan, and every result in the order of the plans.

    A result may come after plans behind its own have been applied, and their releases: it says nothing of a slot that
    has changed hands by then.
    """

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self._due: Shares = {}

    def apply(self, plan: StepPlan) -> None:
        """The next plan has gone out."""
        for shares in self._due.values():
            for slot in plan.released_slots:
                shares.pop(slot, None)
        self.state.apply(plan)
        self._due[plan.step_id] = {scheduled.slot: scheduled for scheduled in plan.scheduled}

    def image(self) -> MirrorImage:
        state = self.state
        occupied = [(slot, params) for slot, params in enumerate(state.sampling_params) if params is not None]
        sequences = [
            AdmittedSequence(
                slot=slot,
                token_ids=state.token_ids[slot, : state.num_tokens[slot]].tolist(),
                num_prompt_tokens=int(state.num_prompt_tokens[slot]),
                num_computed_tokens=int(state.num_computed_tokens[slot]),
                block_ids=state.block_table[slot, : state.num_blocks[slot]].tolist(),
                sampling_params=params,
                seed=int(state.seeds[slot]),
                stop_token_ids=state.stop_token_ids[slot],
                owner=int(state.owners[slot]),
            )
            for slot, params in occupied
        ]
        return MirrorImage(sequences, {step_id: dict(shares) for step_id, shares in self._due.items()})

    def take(self, image: MirrorImage) -> None:
        """Goes on from what another mirror knew; this one is new."""
        for sequence in image.sequences:
            self.state.admit(sequence)
        self._due = image.due

    def commit(self, result: StepResult) -> tuple[BatchOutline, Verdict]:
        """Moves the sequences of a step past it; what became of those that are still in their slots."""
        shares = self._due.pop(result.step_id)
        outcomes = [outcome for outcome in result.sequences if outcome.slot in shares]
        num_emitted = _array([len(outcome.token_ids) for outcome in outcomes])
        failed = np.array([outcome.error is not None for outcome in outcomes], dtype=bool)
        emitted = np.zeros((len(outcomes), int(num_emitted.max(initial=1))), dtype=np.int64)
        outline = BatchOutline(
            slots=_array([outcome.slot for outcome in outcomes]),
            num_new_tokens=_array([shares[outcome.slot].num_new_tokens for outcome in outcomes]),
            num_draft_tokens=_array([outcome.num_drafted for outcome in outcomes]),
        )
        for i, outcome in enumerate(outcomes):
            emitted[i, : num_emitted[i]] = outcome.token_ids
            num_computed = int(outline.num_new_tokens[i]) - int(failed[i])
            self.state.commit(outcome.slot, num_computed, emitted[i, : num_emitted[i]])
        num_accepted = _array([outcome.num_accepted for outcome in outcomes])
        return outline, Verdict(emitted, num_emitted, num_accepted, failed)


def essence(result: StepResult) -> StepResult:
    """What a mirror needs of a result: logprobs may be many times the rest."""
    outcomes = [replace(outcome, logprobs=None, prompt_logprobs=None) for outcome in result.sequences]
    return replace(result, sequences=outcomes)


def _array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
