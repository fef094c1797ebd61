"""How far a lookup can be believed."""

import numpy as np

from app.speculative.suffix import MAX_MATCH_LENGTH, Continuations

SURE = 0.995  # nothing is believed more


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
        prior = np.stack([0.5 * unanimous, unanimous], axis=1).ravel()  # by match length, then unanimous or not
        self._kept = self.PRIOR_WEIGHT * prior
        self._judged = np.full_like(prior, self.PRIOR_WEIGHT)
        self._slot_kept = np.zeros(max_num_seqs)
        self._slot_expected = np.zeros(max_num_seqs)

    def admit(self, slot: int) -> None:
        self._slot_kept[slot] = self._slot_expected[slot] = 0.0

    def probabilities(self, slots: np.ndarray, found: Continuations) -> np.ndarray:
        """Conditional acceptance probability of each draft token, 0 past the last; fp64 [num_seqs, k]."""
        correction = (self._slot_kept[slots] + self.SLOT_WEIGHT) / (self._slot_expected[slots] + self.SLOT_WEIGHT)
        probabilities = np.minimum(self._shared(_cells(found)) * correction[:, None], SURE)
        return np.where(np.arange(found.token_ids.shape[1]) < found.num_tokens[:, None], probabilities, 0.0)

    def observe(
        self,
        slots: np.ndarray,  # [n] int64
        found: Continuations,
        rows: np.ndarray,  # [n] int64: those of `found` that are the slots'
        emitted_token_ids: np.ndarray,  # [n, num] int64: what the target said
        num_emitted: np.ndarray,  # [n] int64
    ) -> None:
        """Drafts up to the first wrong one were judged, as far as the target has spoken."""
        width = min(found.token_ids.shape[1], emitted_token_ids.shape[1])
        positions = np.arange(width)
        num_spoken = np.minimum(found.num_tokens[rows], num_emitted)[:, None]
        agrees = (found.token_ids[rows, :width] == emitted_token_ids[:, :width]) & (positions < num_spoken)
        kept = np.logical_and.accumulate(agrees, axis=1)
        num_judged = np.minimum(kept.sum(axis=1) + 1, num_spoken[:, 0])
        judged = positions < num_judged[:, None]
        cells = _cells(found)[rows, :width]
        expected = (self._shared(cells) * judged).sum(axis=1)
        counts = np.bincount(cells[judged], minlength=len(self._judged))
        decay = self.DECAY**counts
        self._kept = self._kept * decay + np.bincount(cells[kept], minlength=len(self._kept))
        self._judged = self._judged * decay + counts
        slot_decay = self.SLOT_DECAY**num_judged
        self._slot_kept[slots] = self._slot_kept[slots] * slot_decay + kept.sum(axis=1)
        self._slot_expected[slots] = self._slot_expected[slots] * slot_decay + expected

    def _shared(self, cells: np.ndarray) -> np.ndarray:
        return (self._kept / self._judged)[cells]


def _cells(found: Continuations) -> np.ndarray:
    """Where each draft is recorded: by the tokens agreed on before it, earlier drafts included; int64 [num_seqs, k]."""
    lengths = found.match_lengths[:, None] + np.arange(found.token_ids.shape[1])
    return 2 * np.minimum(lengths, MAX_MATCH_LENGTH) + found.unanimous
