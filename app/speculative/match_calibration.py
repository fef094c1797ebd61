"""How far a lookup can be believed."""

import numpy as np

from app.speculative.suffix import MAX_MATCH_LENGTH, Continuation


class MatchCalibration:
    """How often a draft is kept that rests on a match of so many tokens, learned from every step.

    A prediction is judged by what the target said, drafted or not, so being wrong costs nothing and drafting
    comes back by itself where texts begin to repeat. Each slot's record against the shared one corrects for
    requests that differ, such as those sampled at a high temperature.
    """

    PRIOR_WEIGHT = 8.0
    SLOT_WEIGHT = 4.0
    DECAY = 0.998  # of the shared record, a judged draft
    SLOT_DECAY = 0.95

    def __init__(self, max_num_seqs: int) -> None:
        lengths = np.maximum(np.arange(MAX_MATCH_LENGTH + 1), 1)
        unanimous = 1 - 0.92 / lengths
        prior = np.stack([0.5 * unanimous, unanimous], axis=1)  # [match length, unanimous or not]
        self._kept = self.PRIOR_WEIGHT * prior
        self._judged = np.full_like(prior, self.PRIOR_WEIGHT)
        self._slot_kept = np.zeros(max_num_seqs)
        self._slot_expected = np.zeros(max_num_seqs)

    def admit(self, slot: int) -> None:
        self._slot_kept[slot] = self._slot_expected[slot] = 0.0

    def probabilities(self, slot: int, draft: Continuation) -> np.ndarray:
        """Conditional acceptance probability of each draft token; fp64 [num_tokens]."""
        correction = (self._slot_kept[slot] + self.SLOT_WEIGHT) / (self._slot_expected[slot] + self.SLOT_WEIGHT)
        return np.minimum(self._shared(draft) * correction, 0.995)

    def observe(self, slot: int, draft: Continuation, num_kept: int) -> None:
        """Draft tokens up to the first wrong one were judged."""
        num_judged = min(num_kept + 1, len(draft.token_ids))
        expected = self._shared(draft)
        for index in range(num_judged):
            cell = self._cell(draft, index)
            kept = float(index < num_kept)
            self._kept[cell] = self._kept[cell] * self.DECAY + kept
            self._judged[cell] = self._judged[cell] * self.DECAY + 1.0
            self._slot_kept[slot] = self._slot_kept[slot] * self.SLOT_DECAY + kept
            self._slot_expected[slot] = self._slot_expected[slot] * self.SLOT_DECAY + expected[index]

    def _shared(self, draft: Continuation) -> np.ndarray:
        lengths = np.minimum(draft.match_lengths, MAX_MATCH_LENGTH)
        unanimous = (draft.shares == 1.0).astype(np.int64)
        return self._kept[lengths, unanimous] / self._judged[lengths, unanimous]

    @staticmethod
    def _cell(draft: Continuation, index: int) -> tuple[int, int]:
        return min(int(draft.match_lengths[index]), MAX_MATCH_LENGTH), int(draft.shares[index] == 1.0)
