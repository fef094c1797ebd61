"""How likely drafts are to be accepted: by position, by sequence, learned from every verification."""

import numpy as np

DECAY = 0.97  # of what is known, a verification: half of it is forgotten in 23 steps
PRIOR_ACCEPTANCE = 0.6  # hopeful, so that drafting starts and is measured
PRIOR_WEIGHT = 1.0  # verifications that the prior counts for
GLOBAL_WEIGHT = 12.0  # verifications of a sequence that the estimate over all sequences counts for


class AcceptanceModel:
    """Conditional acceptance by position: of draft j, given that all before it were accepted.

    A sequence's estimate is shrunk towards that over all sequences, and the latter's at each position towards
    its estimate one position earlier, so that depths never tried are neither hopeless nor certain.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        self._tried = np.zeros((max_num_seqs, max_num_tokens))
        self._accepted = np.zeros((max_num_seqs, max_num_tokens))
        self._all_tried = np.zeros(max_num_tokens)
        self._all_accepted = np.zeros(max_num_tokens)
        self._shared = np.full(max_num_tokens, PRIOR_ACCEPTANCE)  # estimate over all sequences

    def admit(self, slot: int) -> None:
        """A new sequence knows what all know."""
        self._tried[slot] = self._accepted[slot] = 0.0

    def observe(
        self,
        slots: np.ndarray,  # [num_seqs] int64
        num_drafted: np.ndarray,  # [num_seqs] int64
        num_accepted: np.ndarray,  # [num_seqs] int64
    ) -> None:
        """Draft j was judged where all before it were accepted; what follows a rejection says nothing."""
        positions = np.arange(len(self._all_tried))
        accepted = (positions < num_accepted[:, None]).astype(np.float64)
        tried = (positions < np.minimum(num_accepted + 1, num_drafted)[:, None]).astype(np.float64)
        judged = num_drafted > 0
        if not judged.any():
            return
        slots, accepted, tried = slots[judged], accepted[judged], tried[judged]
        self._tried[slots] = self._tried[slots] * DECAY + tried
        self._accepted[slots] = self._accepted[slots] * DECAY + accepted
        # Sequences of one step are one draw each, so forgetting is by draws; but a step of few is a step.
        decay = DECAY ** max(len(slots) / 4, 1.0)
        self._all_tried = self._all_tried * decay + tried.sum(axis=0)
        self._all_accepted = self._all_accepted * decay + accepted.sum(axis=0)

        prior = PRIOR_ACCEPTANCE
        for position in range(len(self._shared)):
            tried = self._all_tried[position] + PRIOR_WEIGHT
            prior = self._shared[position] = (self._all_accepted[position] + PRIOR_WEIGHT * prior) / tried

    @property
    def num_judged(self) -> float:
        """First drafts that what is known rests on."""
        return float(self._all_tried[0])

    def estimate(self, slots: np.ndarray) -> np.ndarray:
        """Conditional acceptance probabilities; fp64 [num_seqs, max_num_tokens]."""
        return (self._accepted[slots] + GLOBAL_WEIGHT * self._shared) / (self._tried[slots] + GLOBAL_WEIGHT)
