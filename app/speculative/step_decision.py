"""What rank 0 tells the other ranks once a step, as one packed array."""

from dataclasses import dataclass

import numpy as np

from app.speculative.proposer import Drafts, Verdict

STEP = 0
"""The first integer of a packed decision: tells it from the calls of `led_drafter`."""


@dataclass(frozen=True)
class StepDecision:
    """The tokens that the last step emitted, and the drafts that this one verifies; each in its plan's order."""

    num_emitted: np.ndarray  # [num_seqs of the last step] int64
    emitted_token_ids: np.ndarray  # [num_seqs of the last step, k + 1] int64; entries past num_emitted are not read
    num_drafts: np.ndarray  # [num_seqs of this step] int64
    draft_token_ids: np.ndarray  # [num_seqs of this step, k] int64; entries past num_drafts are not read

    @staticmethod
    def of(last_verdict: Verdict, drafts: Drafts) -> "StepDecision":
        return StepDecision(
            last_verdict.num_emitted, last_verdict.emitted_token_ids, drafts.num_tokens, drafts.token_ids
        )

    def packed(self) -> np.ndarray:
        """int64 [n]; token ids that nobody reads are left out."""
        emitted = _ragged(self.emitted_token_ids, self.num_emitted)
        drafts = _ragged(self.draft_token_ids, self.num_drafts)
        sizes = np.array([STEP, len(self.num_emitted), len(self.num_drafts)], dtype=np.int64)
        return np.concatenate([sizes, self.num_emitted, self.num_drafts, emitted, drafts])

    @staticmethod
    def unpack(packed: np.ndarray) -> "StepDecision":
        kind, num_last, num_seqs = packed[:3].tolist()
        assert kind == STEP
        counts = packed[3 : 3 + num_last + num_seqs]
        num_emitted, num_drafts = counts[:num_last], counts[num_last:]
        token_ids = packed[3 + len(counts) :]
        num_emitted_ids = int(num_emitted.sum())
        assert len(token_ids) == num_emitted_ids + num_drafts.sum()
        return StepDecision(
            num_emitted,
            _grid(token_ids[:num_emitted_ids], num_emitted),
            num_drafts,
            _grid(token_ids[num_emitted_ids:], num_drafts),
        )


def _ragged(grid: np.ndarray, num: np.ndarray) -> np.ndarray:
    """The first `num[i]` entries of each row i, one row after the other."""
    return grid[np.arange(grid.shape[1]) < num[:, None]]


def _grid(ragged: np.ndarray, num: np.ndarray) -> np.ndarray:
    """The reverse of `_ragged`, zeros behind each row's entries."""
    grid = np.zeros((len(num), num.max(initial=0)), dtype=np.int64)
    grid[np.arange(grid.shape[1]) < num[:, None]] = ragged
    return grid
