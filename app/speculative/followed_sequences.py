"""Whom a drafter follows that keeps up with the target: all where drafts pay, few where they do not."""

import numpy as np

from app.engine.plan import StepPlan
from app.speculative.cost_model import CostModel
from app.speculative.exploration import ExplorationBudget

GAIN_RATE = 0.05  # of one step, in what drafts are expected to gain of late


class FollowedSequences:
    """To follow costs rows whether there are drafts or not, and who was left once can not be taken up again.

    So it is not the step that decides but what steps expect of late. Where that is less than decoding without a
    drafter, new sequences are followed only as far as the budget for explorations lasts.
    """

    def __init__(self, max_num_seqs: int, draft_cost: CostModel, budget: ExplorationBudget) -> None:
        self.is_given_up = np.zeros(max_num_seqs, dtype=bool)
        self._draft_cost = draft_cost
        self._budget = budget
        self._gain = 1.0

    @property
    def pays(self) -> bool:
        return self._gain >= 1.0

    def expect(self, gain: float) -> None:
        """Tokens per second expected of a step where all sequences are followed, over those without a drafter."""
        self._gain += GAIN_RATE * (gain - self._gain)

    def give_up(self, plan: StepPlan) -> list[int]:
        """Slots of the plan that need not be followed any more."""
        admitted = [sequence.slot for sequence in plan.admitted]
        self.is_given_up[admitted] = False
        if self.pays:
            return []
        left_s = self._budget.left_s
        given_up = []
        if left_s <= 0:
            given_up = [each.slot for each in plan.scheduled if not self.is_given_up[each.slot]]
        for sequence in plan.admitted if left_s > 0 else []:
            left_s -= float(self._draft_cost.seconds(len(sequence.token_ids) - sequence.num_computed_tokens))
            if left_s <= 0:
                given_up.append(sequence.slot)
        self.is_given_up[given_up] = True
        return given_up
