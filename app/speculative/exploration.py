"""What may be spent on drafts that are not expected to pay: else nobody would hear of it when they begin to."""

import numpy as np

from app.speculative.cost_model import CostModel

SHARE = 0.006  # of all time
FIRST_S = 0.02  # granted at once, so that a drafter is tried soon
MOST_S = 0.15  # put by: what cheap explorations have left over is not spent at once where they are dear
DEPTHS = (1, 2, 1, 4)


class ExplorationBudget:
    """Seconds granted, and spent; and what they buy."""

    def __init__(self, pass_cost: CostModel, draft_cost: CostModel | None) -> None:
        self._pass_cost = pass_cost
        self._draft_cost = draft_cost
        self.left_s = FIRST_S
        self.num_explorations = 0
        self.spent_s = 0.0

    def grant(self, step_s: float) -> None:
        """A share of a step's time."""
        self.left_s = min(self.left_s + SHARE * step_s, MOST_S)

    def spend(self, seconds: float) -> None:
        """What was lost; what was won instead is not put by."""
        spent_s = max(seconds, -self.spent_s)
        self.spent_s += spent_s
        self.left_s -= spent_s

    def draft_lengths(
        self,
        limits: np.ndarray,  # [num_seqs] int64: drafts allowed
        num_missing: np.ndarray,  # [num_seqs] int64: tokens that the drafter has yet to see of each
        num_other_rows: int,
    ) -> np.ndarray:
        """Drafts for as many sequences as the budget has for, those whose drafter lacks least; int64 [num_seqs]."""
        depth = DEPTHS[self.num_explorations % len(DEPTHS)]
        lengths = np.minimum(limits, depth)
        if self.left_s <= 0 or not lengths.any():
            return np.zeros_like(limits)
        order = np.argsort(np.where(lengths > 0, num_missing, np.iinfo(np.int64).max), kind="stable")
        num_rows = len(limits) + num_other_rows
        cost_s = self._pass_cost.seconds(num_rows + np.cumsum(lengths[order])) - self._pass_cost.seconds(num_rows)
        if self._draft_cost is not None:
            num_drafting = np.arange(1, len(order) + 1)
            cost_s += self._draft_cost.seconds(num_drafting + np.cumsum(num_missing[order]))
            cost_s += (depth - 1) * self._draft_cost.seconds(num_drafting)
        lengths[order[cost_s > self.left_s]] = 0
        self.num_explorations += bool(lengths.any())
        return lengths
