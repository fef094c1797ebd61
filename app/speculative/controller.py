"""Turns drafting up, down and off, by what it earns on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from app.engine.batch import BatchOutline
from app.engine.plan import StepPlan, StepTimings
from app.engine.sequence_state import SequenceState
from app.speculative.acceptance_model import AcceptanceModel
from app.speculative.cost_model import CostModel
from app.speculative.draft_choice import Decision, choose_draft_lengths
from app.speculative.proposer import Drafts, Verdict

EXPLORATION_SHARE = 0.006  # of all time, for drafts that the model of the moment expects to lose
EXPLORATION_DEPTHS = (1, 2, 1, 4)


@dataclass
class ControllerTotals:
    """What the controller has decided so far; seconds are measured, the gains predicted."""

    num_decisions: int = 0
    num_plain: int = 0  # decisions for no drafts at all
    num_explorations: int = 0
    exploration_s: float = 0.0
    total_s: float = 0.0
    predicted_tokens: float = 0.0  # at the predicted rates, in the measured time
    plain_tokens: float = 0.0  # at the rate predicted for plain decoding, in the measured time
    emitted_tokens: int = 0

    @property
    def predicted_gain(self) -> float:
        """Tokens per second expected, over those of plain decoding."""
        return self.predicted_tokens / self.plain_tokens if self.plain_tokens else 1.0

    @property
    def measured_gain(self) -> float:
        """Tokens per second measured, over those predicted for plain decoding."""
        return self.emitted_tokens / self.plain_tokens if self.plain_tokens else 1.0


@dataclass
class Choice:
    """What the controller made of one plan."""

    decision: Decision | None = None
    explores: bool = False
    depth: int = 0  # passes that the drafter was asked for

    @property
    def drafts_pay(self) -> bool:
        return self.decision is not None and bool(self.decision.num_tokens.any())


class DraftLengthController:
    """Gives every sequence of a step the number of drafts, 0 included, that the batch earns most by.

    A drafter is told before it drafts. One that says how likely each draft is to be kept drafts first, and what
    does not pay is cut before verification. Neither ever changes a text.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        pass_cost: CostModel,
        draft_cost: CostModel | None,  # of a drafter's pass; None: its drafts are as good as free
        states_acceptance: bool = False,  # drafts come with the probability that they are kept
        drafter_keeps_up: bool = False,  # rows of steps without drafts are run later, with others
    ) -> None:
        assert not (states_acceptance and draft_cost), "a drafter that costs passes is told before it drafts"
        self.totals = ControllerTotals()
        self._acceptance = AcceptanceModel(max_num_seqs, max_num_tokens)
        self._pass_cost = pass_cost
        self._draft_cost = draft_cost
        self._states_acceptance = states_acceptance
        self._drafter_keeps_up = drafter_keeps_up
        self.choice = Choice()  # of the latest plan
        self._leaves_backlog = True  # the last step left the drafter more rows than a step of drafts does

    def plan(self, state: SequenceState, plan: StepPlan) -> StepPlan:
        """The plan with the draft lengths that pay, where they can be told before drafting; else `cut` does."""
        for sequence in plan.admitted:
            self._acceptance.admit(sequence.slot)
        self.choice = choice = Choice()
        if self._states_acceptance:
            return plan
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
        limits = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)
        samples = _samples(state, plan)
        num_other_rows = sum(s.num_new_tokens for s in plan.scheduled) - int(samples.sum())
        acceptance = self._acceptance.estimate(slots[samples])
        self._decide(acceptance, limits[samples], num_other_rows)
        lengths = np.zeros(len(slots), dtype=np.int64)
        if choice.decision is not None:
            lengths[samples] = choice.decision.num_tokens
            if not lengths.any() and limits.any() and self._may_explore():
                choice.explores = True
                depth = EXPLORATION_DEPTHS[self.totals.num_explorations % len(EXPLORATION_DEPTHS)]
                lengths = np.minimum(limits, depth)
        choice.depth = int(lengths.max(initial=0))
        return replace(
            plan,
            scheduled=[
                replace(scheduled, num_draft_tokens=length)
                for scheduled, length in zip(plan.scheduled, lengths.tolist(), strict=True)
            ],
        )

    def cut(self, state: SequenceState, plan: StepPlan, drafts: Drafts) -> Drafts:
        """Drafts that say how likely they are to be kept, without those that do not pay."""
        if not self._states_acceptance:
            return drafts
        assert drafts.acceptance is not None
        samples = _samples(state, plan)
        num_other_rows = sum(s.num_new_tokens for s in plan.scheduled) - int(samples.sum())
        self._decide(drafts.acceptance[samples], drafts.num_tokens[samples], num_other_rows)
        if self.choice.decision is None:
            return drafts
        num_tokens = np.zeros_like(drafts.num_tokens)
        num_tokens[samples] = self.choice.decision.num_tokens
        return replace(drafts, num_tokens=num_tokens)

    def observe(
        self,
        batch: BatchOutline,
        verdict: Verdict,
        timings: StepTimings,
        choice: Choice | None = None,  # None: that of the latest plan
    ) -> None:
        """Learns from a step: what its rows cost, what its drafter cost, which drafts were kept."""
        choice = choice or self.choice
        pass_s = timings.forward_s + timings.verify_s
        step_s = timings.propose_s + pass_s
        self._pass_cost.observe(batch.num_tokens, pass_s)
        num_drafting = int((batch.num_draft_tokens > 0).sum())
        if self._draft_cost is not None and choice.depth and num_drafting:
            draft_s = timings.propose_s / choice.depth
            if self._leaves_backlog:  # it made drafts dearer than they are, never cheaper
                draft_s = min(draft_s, float(self._draft_cost.seconds(num_drafting)))
            self._draft_cost.observe(num_drafting, draft_s)
        num_prompt_rows = batch.num_tokens - len(batch.slots) - int(batch.num_draft_tokens.sum())
        self._leaves_backlog = num_prompt_rows > 0 or not num_drafting
        if not self._states_acceptance:
            self._acceptance.observe(batch.slots, batch.num_draft_tokens, verdict.num_accepted)
        totals = self.totals
        totals.total_s += step_s
        if choice.decision is not None:
            if choice.explores:
                totals.num_explorations += 1
                lost_s = self._net_cost(batch, verdict, timings, choice.decision)
                totals.exploration_s = max(totals.exploration_s + lost_s, 0.0)
            totals.num_decisions += 1
            totals.num_plain += not choice.drafts_pay
            totals.predicted_tokens += choice.decision.predicted_rate * step_s
            totals.plain_tokens += choice.decision.plain_rate * step_s
            totals.emitted_tokens += int(verdict.num_emitted.sum())

    def stats(self) -> dict[str, float]:
        gains = {"predicted_gain": self.totals.predicted_gain, "measured_gain": self.totals.measured_gain}
        return {f"controller_{name}": value for name, value in {**vars(self.totals), **gains}.items()}

    def _decide(self, acceptance: np.ndarray, limits: np.ndarray, num_other_rows: int) -> None:
        if len(limits):
            self.choice.decision = choose_draft_lengths(
                acceptance, limits, num_other_rows, self._pass_cost, self._draft_cost, self._drafter_keeps_up
            )

    def _net_cost(self, batch: BatchOutline, verdict: Verdict, timings: StepTimings, decision: Decision) -> float:
        """Seconds that an exploration lost: what its drafts that were kept have saved is not spent.

        So one that succeeds is followed by another at once, and drafting comes back within a few steps.
        """
        plain_rows = batch.num_tokens - int(batch.num_draft_tokens.sum())
        added_s = timings.propose_s + timings.forward_s + timings.verify_s - float(self._pass_cost.seconds(plain_rows))
        return added_s - int(verdict.num_accepted.sum()) / decision.plain_rate

    def _may_explore(self) -> bool:
        return self.totals.exploration_s < EXPLORATION_SHARE * self.totals.total_s


def calibrate(time_pass: Callable[[int], float], rows: list[int], num_repeats: int = 3) -> CostModel:
    """The cost of passes with so many rows each; the fastest of the repeats counts, since noise only adds."""
    return CostModel(rows, [min(time_pass(num_rows) for _ in range(num_repeats)) for num_rows in rows])


def _samples(state: SequenceState, plan: StepPlan) -> np.ndarray:
    """Sequences of the plan whose rows reach their last known token; bool [num_seqs]."""
    slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
    num_new_tokens = np.array([scheduled.num_new_tokens for scheduled in plan.scheduled], dtype=np.int64)
    return state.num_computed_tokens[slots] + num_new_tokens == state.num_tokens[slots]
