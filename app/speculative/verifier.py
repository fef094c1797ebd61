"""Decides which drafts the target accepts, and what it says in place of the first that it does not.

Rejection sampling is in `rejection.py`. Coupled verification: Daliri, Musco, Suresh, "Coupling without communication
and drafter-invariant speculative decoding", arXiv 2408.07978.
"""

from dataclasses import dataclass

import numpy as np
import torch

from app.engine.batch import Batch
from app.engine.logits_processor import LogitsRows
from app.engine.sampler import Sampler
from app.speculative.config import VerificationMode
from app.speculative.proposer import Drafts, Verdict
from app.speculative.rejection import RejectionRows, reject


def is_coupled(mode: VerificationMode, sampler: Sampler, slots: np.ndarray) -> np.ndarray:
    """Slots whose tokens are drawn with noise that depends on seed and position alone; bool [n].

    Brings the sampler's table up to date for them, which sampling relies on.
    """
    sampler.table.refresh(slots)
    return sampler.table.is_seeded[slots] if mode == "auto" else np.full(len(slots), mode == "coupled")


@dataclass(frozen=True)
class _Layout:
    """Where the rows of a batch's logits belong."""

    rows: LogitsRows
    row_seq: np.ndarray  # [num_rows] int64: sequence of the batch
    row_draft: np.ndarray  # [num_rows] int64: the draft that the row judges; -1 in a sequence's last row
    first_row: np.ndarray  # [num_seqs] int64

    @staticmethod
    def of(batch: Batch, drafts: Drafts, vocab_size: int) -> "_Layout":
        num_rows = batch.num_logits_rows
        first_row = np.cumsum(num_rows) - num_rows
        row_seq = np.repeat(np.arange(batch.num_seqs), num_rows)
        row_in_seq = np.arange(len(row_seq)) - first_row[row_seq]
        judges = row_in_seq < num_rows[row_seq] - 1
        row_draft = np.full(len(row_seq), -1, dtype=np.int64)
        row_draft[judges] = drafts.token_ids[row_seq[judges], row_in_seq[judges]]
        assert ((row_draft[judges] >= 0) & (row_draft[judges] < vocab_size)).all(), "a draft is no token of the target"
        rows = LogitsRows(batch.slots[row_seq], drafts.token_ids[row_seq], row_in_seq)
        return _Layout(rows, row_seq, row_draft, first_row)


class Verifier:
    """Judges every row under its own history, with greedy, coupled and rejection rows side by side."""

    def __init__(self, sampler: Sampler, mode: VerificationMode = "auto") -> None:
        self._sampler = sampler
        self._mode: VerificationMode = mode

    @torch.inference_mode()
    def verify(
        self,
        logits: torch.Tensor,  # [num_logits, vocab_size] fp32, of the batch's `logits_rows`; left as they are
        batch: Batch,
        drafts: Drafts,
    ) -> Verdict:
        """The verdict on a step that is not committed yet: `state` still ends before the drafts."""
        layout = _Layout.of(batch, drafts, logits.shape[1])
        coupled = is_coupled(self._mode, self._sampler, batch.slots)
        sampled = self._sampler.sample(logits, layout.rows, coupled[layout.row_seq])
        packed, is_soft = [sampled.token_ids, sampled.usable], sampled.prob_rows >= 0
        if sampled.probs is not None:
            soft = np.flatnonzero(is_soft)
            accepted_soft, drawn = reject(self._rejection_rows(layout, soft, sampled.prob_rows, sampled.probs, drafts))
            packed += [_spread(accepted_soft, soft, len(is_soft)), _spread(drawn, soft, len(is_soft))]
        host = torch.stack([column.long() for column in packed]).cpu().numpy()  # the step's one copy to the host

        token_ids, usable = host[0], host[1].astype(bool)
        accepted = token_ids == layout.row_draft
        if sampled.probs is not None:
            accepted = np.where(is_soft, host[2].astype(bool), accepted)
            token_ids = np.where(is_soft, host[3], token_ids)
        return _count(batch, layout, drafts, token_ids, accepted & usable, usable)

    def _rejection_rows(
        self, layout: _Layout, soft: np.ndarray, prob_rows: np.ndarray, probs: torch.Tensor, drafts: Drafts
    ) -> RejectionRows:
        rows, state = layout.rows[soft], self._sampler.state
        return RejectionRows(
            probs=probs,
            prob_row=prob_rows[soft],
            draft=layout.row_draft[soft],
            seq=layout.row_seq[soft],
            row_in_seq=rows.num_drafts,
            seeds=state.seeds[rows.slots],
            positions=state.num_tokens[rows.slots] + rows.num_drafts,
            draft_probs=drafts.probs if drafts.token_ids.shape[1] else None,
        )


def _spread(values: torch.Tensor, rows: np.ndarray, num_rows: int) -> torch.Tensor:
    """`values` of some rows among all of them; int64 [num_rows]."""
    spread = torch.zeros(num_rows, dtype=torch.int64, device=values.device)
    spread[torch.from_numpy(rows).to(values.device, non_blocking=True)] = values.long()
    return spread


def _count(
    batch: Batch,
    layout: _Layout,
    drafts: Drafts,
    token_ids: np.ndarray,  # [num_rows] what a run says that ends in this row
    accepted: np.ndarray,  # [num_rows] bool; False in rows that are not usable
    usable: np.ndarray,  # [num_rows] bool
) -> Verdict:
    """Ends each sequence's run at its first row without an accepted draft."""
    num_seqs, samples = batch.num_seqs, batch.num_logits_rows > 0
    grid = np.zeros((num_seqs, drafts.token_ids.shape[1] + 1), dtype=bool)
    grid[layout.row_seq, layout.rows.num_drafts] = accepted
    num_accepted = np.logical_and.accumulate(grid, axis=1).sum(axis=1)
    sampling = np.flatnonzero(samples)
    last = layout.first_row[sampling] + num_accepted[sampling]
    failed = np.zeros(num_seqs, dtype=bool)
    failed[sampling] = ~usable[last]
    num_accepted[failed] = 0

    emitted = np.zeros((num_seqs, drafts.token_ids.shape[1] + 1), dtype=np.int64)
    emitted[:, :-1] = drafts.token_ids
    emitted[sampling, num_accepted[sampling]] = token_ids[last]
    num_emitted = np.where(samples & ~failed, num_accepted + 1, 0)
    return Verdict(emitted, num_emitted, num_accepted, failed)
