"""How many experts a pass touches, when every row chooses independently and any expert is as likely as another.

Rows of one text choose more alike than that, and touch fewer.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoad:
    """The routed experts of a layer, and on how many ranks they are."""

    num_experts: int
    num_per_token: int
    num_ranks: int  # that hold some experts whole; 1: every rank has a share of each

    def expected(self, num_rows: float) -> float:
        """Distinct experts over all ranks."""
        return self.num_experts * self._probability(num_rows)

    def share_read(self, num_rows: float) -> float:
        """Of the expert weights that a rank holds, what it reads; of the busiest rank, for which the others wait."""
        if self.num_ranks == 1:
            return self._probability(num_rows)
        num_held = self.num_experts // self.num_ranks
        return _expected_maximum(num_held, self._probability(num_rows), self.num_ranks) / num_held

    def _probability(self, num_rows: float) -> float:
        """That one expert has a row."""
        return 1 - (1 - self.num_per_token / self.num_experts) ** num_rows


def _expected_maximum(num_trials: int, probability: float, num_draws: int) -> float:
    """Of independent draws from a binomial distribution: the sum over n of P(some draw exceeds n)."""
    below, expected = 0.0, 0.0
    for n in range(num_trials):
        below += math.comb(num_trials, n) * probability**n * (1 - probability) ** (num_trials - n)
        expected += 1 - below**num_draws
    return expected
