"""Turns drafting up, down and off, by what it earns on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from app.engine.batch import BatchOutline
from app.engine.plan import StepPlan, StepTimings
from app.engine.sequence_state import SequenceState
from app.speculative.acceptance_model import AcceptanceModel
from app.speculative.controller_totals import ControllerTotals
from app.speculative.cost_model import CostModel
from app.speculative.draft_choice import Decision, choose_draft_lengths
from app.speculative.exploration import ExplorationBudget
from app.speculative.followed_sequences import FollowedSequences
from app.speculative.prediction_record import PredictionRecord
from app.speculative.proposer import Drafts, Verdict

PLAIN_CHECK_STEPS = 32  # of drafts that gain little, after which a step without shows what they are set beside
LITTLE_GAIN = 1.2
HELD_STEPS = 8  # so long a decision for no drafts stands where nothing has changed
LEAST_HORIZON, MOST_HORIZON = 4, 64  # steps that must pay for what a drafter runs before it drafts
LEARNED_COSTS = 16  # steps of drafts after which what a draft costs is known: calibration times its pass alone
USUAL_FACTOR = 1.33  # beside its prediction: a pass that takes longer, or less, had other reasons than its drafts


@dataclass
class Choice:
    """What the controller made of one plan."""

    decision: Decision | None = None
    explores: bool = False
    depth: int = 0  # passes that the drafter was asked for
    stated: np.ndarray | None = None  # [num_seqs, k] acceptance that came with the drafts

    @property
    def drafts_pay(self) -> bool:
        return self.decision is not None and self.decision.drafts


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
        self._budget = ExplorationBudget(pass_cost, draft_cost)
        self._followed: FollowedSequences | None = None
        if drafter_keeps_up:
            assert draft_cost is not None, "only passes of a drafter can keep up"
            self._followed = FollowedSequences(max_num_seqs, draft_cost, self._budget)
        self._num_seen = np.zeros(max_num_seqs, dtype=np.int64)  # tokens that the drafter has run, by slot
        self._stated = PredictionRecord(weight=10.0, decay=0.99)  # of drafts that came with probabilities
        self._earned = PredictionRecord(weight=16.0, decay=0.998)  # in tokens a sequence
        self.choice = Choice()  # of the latest plan
        self._leaves_backlog = True  # the last step left the drafter more rows than a step of drafts does
        self._num_held = 0  # steps that the latest decision, for no drafts, goes on to stand for
        self._num_since_plain = 0  # steps of drafts since the last one without
        self._num_draft_costs = 0  # steps that have told what drafts cost

    def plan(self, state: SequenceState, plan: StepPlan) -> StepPlan:
        """The plan with the draft lengths that pay, where they can be told before drafting; else `cut` does."""
        for sequence in plan.admitted:
            self._acceptance.admit(sequence.slot)
            self._num_seen[sequence.slot] = 0
        if self._states_acceptance:
            self.choice = Choice()
            return plan
        holds = self._holds(plan)
        given_up = []
        if self._followed is not None:
            if not holds:
                self._followed.expect(self._gain(plan))
            given_up = self._followed.give_up(plan)
        lengths = [0] * len(plan.scheduled)
        if holds:
            self._num_held -= 1
            self.choice = Choice(self.choice.decision)
        else:
            lengths = self._draft_lengths(state, plan).tolist()
        return replace(plan.with_draft_lengths(lengths), given_up_slots=given_up)

    def cut(self, state: SequenceState, plan: StepPlan, drafts: Drafts) -> Drafts:
        """Drafts that say how likely they are to be kept, without those that do not pay."""
        if not self._states_acceptance:
            return drafts
        assert drafts.acceptance is not None
        samples = _samples(state, plan)
        num_seqs = int(samples.sum())
        if not num_seqs:
            return drafts
        if not drafts.num_tokens.any():
            rate = num_seqs / float(self._pass_cost.seconds(num_seqs))
            self.choice.decision = Decision(np.zeros(num_seqs, dtype=np.int64), rate, rate)
            return drafts
        num_other_rows = sum(s.num_new_tokens for s in plan.scheduled) - num_seqs
        believed = np.minimum(self._stated.ratio * drafts.acceptance[samples], 1.0)
        limits = drafts.num_tokens[samples]
        decision = choose_draft_lengths(believed, limits, num_other_rows, self._pass_cost, None, trust=self._trust)
        self.choice.decision, self.choice.stated = decision, drafts.acceptance
        num_tokens = np.zeros_like(drafts.num_tokens)
        num_tokens[samples] = decision.num_tokens
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
        num_drafting = int((batch.num_draft_tokens > 0).sum())
        has_prompt = batch.num_tokens > len(batch.slots) + int(batch.num_draft_tokens.sum())
        if choice.stated is not None:
            self._observe_stated(choice.stated, batch.num_draft_tokens, verdict.num_accepted)
        elif num_drafting:
            self._num_held = 0
            self._acceptance.observe(batch.slots, batch.num_draft_tokens, verdict.num_accepted)
        if not has_prompt:  # rows of a prompt have no logits, and contexts of their own
            self._observe_earnings(batch, verdict, timings, choice)
            self._observe_costs(batch, timings, choice, num_drafting)
        self._leaves_backlog = has_prompt or not num_drafting
        self._count(batch, verdict, timings, choice, has_prompt)

    @property
    def follows_all(self) -> bool:
        """Drafts are expected to pay: new sequences are drafted for whatever their prompts cost the drafter."""
        return self._followed is None or self._followed.pays

    def drafter_starts_anew(self) -> None:
        """It has seen nothing of any sequence, and must before it drafts."""
        self._num_seen[:] = 0

    def stats(self) -> dict[str, float]:
        gains = {"predicted_gain": self.totals.predicted_gain, "measured_gain": self.totals.measured_gain}
        return {f"controller_{name}": value for name, value in {**vars(self.totals), **gains}.items()}

    def _holds(self, plan: StepPlan) -> bool:
        """The same sequences as when no drafts were found to pay, and nothing learned of them since."""
        decision = self.choice.decision
        return (
            self._num_held > 0
            and decision is not None
            and len(plan.scheduled) == len(decision.num_tokens)
            and not plan.admitted
            and not plan.released_slots
        )

    def _draft_lengths(self, state: SequenceState, plan: StepPlan) -> np.ndarray:
        """Decides for the plan's sequences; int64 [num_seqs]."""
        self.choice = choice = Choice()
        samples = _samples(state, plan)
        lengths = np.zeros(len(plan.scheduled), dtype=np.int64)
        if not samples.any():
            return lengths
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)[samples]
        limits = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)[samples]
        num_other_rows = sum(s.num_new_tokens for s in plan.scheduled) - len(slots)
        num_missing = np.where(limits > 0, np.maximum(state.num_tokens[slots] - self._num_seen[slots], 0), 0)
        if self._followed is not None:
            limits = np.where(self._followed.is_given_up[slots], 0, limits)
            num_missing[:] = 0  # it has kept up
        choice.decision = self._decide(slots, limits, num_other_rows, num_missing)
        chosen = choice.decision.num_tokens
        if self._must_check_plain(choice.decision):
            chosen = np.zeros_like(chosen)
        elif not chosen.any():
            chosen = self._budget.draft_lengths(limits, num_missing, num_other_rows)
            choice.explores = bool(chosen.any())
            self._num_held = HELD_STEPS if num_other_rows == 0 else 0
        drafts = chosen > 0
        self._num_since_plain = self._num_since_plain + 1 if drafts.any() else 0
        self._num_seen[slots[drafts]] = state.num_tokens[slots[drafts]] + chosen[drafts]
        choice.depth = int(chosen.max(initial=0))
        lengths[samples] = chosen
        return lengths

    def _decide(self, slots: np.ndarray, limits: np.ndarray, num_other_rows: int, num_missing: np.ndarray) -> Decision:
        start_s = 0.0
        if self._draft_cost is not None and num_missing.any():
            # What is spent on few drafts' word must pay in few steps.
            num_steps = min(LEAST_HORIZON + self._acceptance.num_judged, MOST_HORIZON)
            num_rows = len(slots) + np.array([0, num_missing.sum()])
            start_s = float(np.diff(self._draft_cost.seconds(num_rows))[0]) / num_steps
        return choose_draft_lengths(
            self._acceptance.estimate(slots),
            limits,
            num_other_rows,
            self._pass_cost,
            self._draft_cost,
            num_followed=0 if self._followed is None else int((limits > 0).sum()),
            start_s=start_s,
            trust=self._trust,
        )

    def _gain(self, plan: StepPlan) -> float:
        """What following all sequences of the plan would be worth, over not following any."""
        if not plan.scheduled:
            return 1.0
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
        acceptance = self._acceptance.estimate(slots)
        limits = np.full(len(slots), acceptance.shape[1])
        decision = self._decide(slots, limits, 0, np.zeros(len(slots), dtype=np.int64))
        trust = self._trust if decision.drafts else 1.0
        return trust * decision.predicted_rate / decision.plain_rate

    @property
    def _trust(self) -> float:
        return min(self._earned.ratio, 1.0)

    def _must_check_plain(self, decision: Decision) -> bool:
        is_due = self._num_since_plain >= PLAIN_CHECK_STEPS
        return is_due and not decision.predicted_rate > LITTLE_GAIN * decision.plain_rate

    def _observe_stated(self, stated: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray) -> None:
        """Draft j was judged where all before it were accepted."""
        judged = np.arange(stated.shape[1]) < np.minimum(num_accepted + 1, num_drafted)[:, None]
        self._stated.observe(float(num_accepted.sum()), float(stated[judged].sum()))

    def _observe_earnings(self, batch: BatchOutline, verdict: Verdict, timings: StepTimings, choice: Choice) -> None:
        """Sets tokens of a step of drafts beside those predicted for its time, hiccups aside."""
        acted = choice.drafts_pay if self._states_acceptance else choice.depth > 0
        is_learning = self._draft_cost is not None and self._num_draft_costs < LEARNED_COSTS
        if choice.decision is None or not acted or choice.explores or is_learning:
            self._earned.observe(0.0, 0.0)
            return
        propose_s = 0.0 if self._states_acceptance else timings.propose_s  # what is looked up in any case
        num_predicted = choice.decision.predicted_rate * (propose_s + self._usual_pass_s(batch, timings))
        self._earned.observe(float(verdict.num_emitted.mean()), num_predicted / len(batch.slots))

    def _observe_costs(self, batch: BatchOutline, timings: StepTimings, choice: Choice, num_drafting: int) -> None:
        pace = self._pass_cost.observe(batch.num_tokens, timings.forward_s + timings.verify_s)
        if self._draft_cost is None:
            return
        self._draft_cost.change_pace(pace)
        if choice.depth and num_drafting:
            draft_s = timings.propose_s / choice.depth
            if self._leaves_backlog:  # it made drafts dearer than they are, never cheaper
                draft_s = min(draft_s, float(self._draft_cost.seconds(num_drafting)))
            self._draft_cost.observe(num_drafting, draft_s)
            self._num_draft_costs += 1

    def _count(
        self, batch: BatchOutline, verdict: Verdict, timings: StepTimings, choice: Choice, has_prompt: bool
    ) -> None:
        totals, decision = self.totals, choice.decision
        step_s = timings.propose_s + timings.forward_s + timings.verify_s
        totals.total_s += step_s
        self._budget.grant(step_s)
        if choice.explores and decision is not None:
            self._budget.spend(self._net_cost(batch, verdict, timings, decision))
        elif self._followed is not None and not self._followed.pays:
            self._budget.spend(timings.propose_s)
        totals.num_explorations, totals.exploration_s = self._budget.num_explorations, self._budget.spent_s
        if decision is None:
            return
        totals.num_decisions += 1
        totals.num_plain += not choice.drafts_pay
        if not has_prompt:
            totals.predicted_tokens += decision.predicted_rate * step_s
            totals.plain_tokens += decision.plain_rate * step_s
            totals.emitted_tokens += int(verdict.num_emitted.sum())

    def _net_cost(self, batch: BatchOutline, verdict: Verdict, timings: StepTimings, decision: Decision) -> float:
        """Seconds that an exploration lost: what its drafts that were kept have saved is not spent.

        So one that succeeds is followed by another at once, and drafting comes back within a few steps.
        """
        without_s = float(self._pass_cost.seconds(batch.num_tokens - int(batch.num_draft_tokens.sum())))
        added_s = timings.propose_s + self._usual_pass_s(batch, timings) - without_s
        return added_s - int(verdict.num_accepted.sum()) / decision.plain_rate

    def _usual_pass_s(self, batch: BatchOutline, timings: StepTimings) -> float:
        """Seconds of the target's pass, hiccups aside."""
        predicted_s = float(self._pass_cost.seconds(batch.num_tokens))
        return min(max(timings.forward_s + timings.verify_s, predicted_s / USUAL_FACTOR), predicted_s * USUAL_FACTOR)


def calibrate(time_pass: Callable[[int], float], rows: list[int], num_repeats: int = 3) -> CostModel:
    """The cost of passes with so many rows each; the fastest of the repeats counts, since noise only adds."""
    return CostModel(rows, [min(time_pass(num_rows) for _ in range(num_repeats)) for num_rows in rows])


def _samples(state: SequenceState, plan: StepPlan) -> np.ndarray:
    """Sequences of the plan whose rows reach their last known token; bool [num_seqs]."""
    slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
    num_new_tokens = np.array([scheduled.num_new_tokens for scheduled in plan.scheduled], dtype=np.int64)
    return state.num_computed_tokens[slots] + num_new_tokens == state.num_tokens[slots]
