"""Rejection sampling of drafts (Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1), many sequences at once.

Stays on the device, since a run ends where the device finds that it does.
"""

from dataclasses import dataclass

import numpy as np
import torch

from app.engine.randomness import Purpose, uniforms
from app.engine.sampler import inverse_cdf


@dataclass(frozen=True)
class RejectionRows:
    """The rows to judge, sequence by sequence; a sequence's last row judges no draft."""

    probs: torch.Tensor  # [n, vocab_size] fp32: the target's, processed
    prob_row: np.ndarray  # [num_rows] int64: the row's row in `probs`
    draft: np.ndarray  # [num_rows] int64: the draft that follows the row; -1 in a sequence's last row
    seq: np.ndarray  # [num_rows] int64: index of the sequence in `draft_probs`
    row_in_seq: np.ndarray  # [num_rows] int64
    seeds: np.ndarray  # [num_rows] uint64
    positions: np.ndarray  # [num_rows] int64: index in the sequence of the token that the row is for
    draft_probs: torch.Tensor | None  # [num_seqs, k, vocab_size] that drafts were drawn from; None: one-hot


def reject(rows: RejectionRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each row's draft is accepted, and the token drawn in the row that ends each sequence's run.

    Returns a bool and an int64 tensor [num_rows]; the second is filled in those rows only. A row whose probs are NaN
    accepts nothing.
    """
    accepted = _accept(rows)
    # Past its end a sequence repeats its last row, which judges no draft and so ends the run at the latest.
    firsts = np.flatnonzero(rows.row_in_seq == 0)
    num_rows = np.diff(np.append(firsts, len(rows.seq)))
    grid = firsts[:, None] + np.minimum(np.arange(num_rows.max()), num_rows[:, None] - 1)
    num_accepted = accepted[_like(rows, grid)].long().cumprod(dim=1).sum(dim=1)
    last = _like(rows, firsts) + num_accepted

    recover = uniforms(rows.seeds, rows.positions, Purpose.RECOVER)
    bonus = uniforms(rows.seeds, rows.positions, Purpose.BONUS)
    numbers = _like(rows, np.where(rows.draft >= 0, recover, bonus))
    drawn = torch.zeros(len(rows.seq), dtype=torch.int64, device=rows.probs.device)
    drawn[last] = inverse_cdf(_weights(rows, last, num_accepted), numbers[last])
    return accepted, drawn


def _accept(rows: RejectionRows) -> torch.Tensor:
    """draft_probs[x] * u < target_probs[x], which is never so where the target rules the draft x out."""
    judging = np.flatnonzero(rows.draft >= 0)
    index, draft = _like(rows, judging), _like(rows, rows.draft[judging])
    numbers = _like(rows, uniforms(rows.seeds[judging], rows.positions[judging], Purpose.ACCEPT))
    target_prob = rows.probs[_like(rows, rows.prob_row[judging]), draft].double()
    if rows.draft_probs is not None:
        seq, row_in_seq = _like(rows, rows.seq[judging]), _like(rows, rows.row_in_seq[judging])
        numbers = numbers * rows.draft_probs[seq, row_in_seq, draft].double()
    accepted = torch.zeros(len(rows.seq), dtype=torch.bool, device=rows.probs.device)
    accepted[index] = numbers < target_prob
    return accepted


def _weights(rows: RejectionRows, last: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """What the end of each run is drawn from: the residual after a rejection, else the target's own distribution."""
    target = rows.probs[_like(rows, rows.prob_row)[last]]
    draft = _like(rows, rows.draft)[last]
    if rows.draft_probs is None:
        residual = target.scatter(1, draft.clamp(min=0)[:, None], 0.0)
    else:
        draft_row = num_accepted.clamp(max=rows.draft_probs.shape[1] - 1)
        residual = (target - rows.draft_probs[_like(rows, rows.seq)[last], draft_row]).clamp_(min=0)
    # Where target and draft agree to the last bit nothing is left over: the rejection was rounding, and the target's
    # distribution is the right one to draw from.
    recovers = (draft >= 0) & (residual.sum(dim=-1) > 0)
    return torch.where(recovers[:, None], residual, target)


def _like(rows: RejectionRows, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(rows.probs.device, non_blocking=True)
