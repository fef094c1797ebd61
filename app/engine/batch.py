"""A ragged batch: the rows of one forward pass and where they stand."""

from dataclasses import dataclass

import numpy as np
import torch

from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class BatchOutline:
    """Whose rows one forward pass has, and how many: all that is known of it away from the target."""

    slots: np.ndarray  # [num_seqs] int64
    num_new_tokens: np.ndarray  # [num_seqs] int64, without drafts
    num_draft_tokens: np.ndarray  # [num_seqs] int64

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum() + self.num_draft_tokens.sum())


@dataclass(frozen=True)
class Batch(BatchOutline):
    """Rows of one forward pass, sequence by sequence: known tokens to compute, then drafts.

    Sequence i holds the rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]`. Where it samples
    (`num_logits_rows[i] > 0`), its last `num_logits_rows[i]` rows give the logits of the token that
    follows the last known one and of those that follow each draft.
    """

    num_logits_rows: np.ndarray  # [num_seqs] int64: 1 + drafts, or 0 in the midst of a prompt
    cu_seqlens_q: np.ndarray  # [num_seqs + 1] int64
    logits_rows: np.ndarray  # [num_logits] int64: rows whose logits are sampled
    token_ids: torch.Tensor  # [num_tokens] int64, on the device
    positions: torch.Tensor  # [num_tokens] int64, on the device
    attention: AttentionMetadata  # on the device


def step_batch(
    state: SequenceState,
    plan: StepPlan,
    draft_token_ids: np.ndarray,  # [num_seqs, k] int64; entries past a sequence's drafts are not read
    num_draft_tokens: np.ndarray,  # [num_seqs] int64, at most k
    device: torch.device,
) -> Batch:
    """Lays out the plan's batch, with drafts where they are to be verified."""
    slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
    num_new_tokens = np.array([scheduled.num_new_tokens for scheduled in plan.scheduled], dtype=np.int64)
    starts = state.num_computed_tokens[slots]
    samples = starts + num_new_tokens == state.num_tokens[slots]
    return build_batch(state, slots, starts, num_new_tokens, draft_token_ids, num_draft_tokens, samples, device)


def commit_batch(
    state: SequenceState,
    batch: Batch,
    emitted_token_ids: np.ndarray,  # [num_seqs, 1 + k] int64; entries past num_emitted are not read
    num_emitted: np.ndarray,  # [num_seqs] int64
) -> None:
    """Moves every sequence of a step past it.

    One that was to emit and did not has failed. It ends, but a plan that is out already may ask for its last token
    once more, which therefore stays to be computed.
    """
    has_failed = (batch.num_logits_rows > 0) & (num_emitted == 0)
    num_computed = batch.num_new_tokens - has_failed
    for i, slot in enumerate(batch.slots.tolist()):
        state.commit(slot, int(num_computed[i]), emitted_token_ids[i, : num_emitted[i]])


@dataclass(frozen=True)
class Rows:
    """Where the rows of a ragged batch stand, sequence by sequence."""

    cu_seqlens_q: np.ndarray  # [num_seqs + 1] int64
    row_seq: np.ndarray  # [num_tokens] int64: the row's sequence in the batch
    slots: np.ndarray  # [num_tokens] int64
    positions: np.ndarray  # [num_tokens] int64
    context_lens: np.ndarray  # [num_seqs] int64: positions up to and with the last row
    max_seqlen_q: int


def build_batch(
    state: SequenceState,
    slots: np.ndarray,  # [num_seqs] int64
    starts: np.ndarray,  # [num_seqs] int64: position of each sequence's first row
    num_new_tokens: np.ndarray,  # [num_seqs] int64; 0 where drafts alone are rows (a drafter's passes)
    draft_token_ids: np.ndarray,  # [num_seqs, k] int64; entries past a sequence's drafts are not read
    num_draft_tokens: np.ndarray,  # [num_seqs] int64, at most k
    samples: np.ndarray,  # [num_seqs] bool: the rows reach the sequence's last known token
    device: torch.device,
) -> Batch:
    """Lays out a forward pass over `state`'s sequences; drafts stand after the last known token."""
    rows = lay_out_rows(slots, starts, num_new_tokens + num_draft_tokens)
    row_seq, positions = rows.row_seq, rows.positions
    token_ids = state.token_ids[rows.slots, np.minimum(positions, state.max_model_len - 1)]
    draft_index = positions - (starts + num_new_tokens)[row_seq]
    is_draft = draft_index >= 0
    token_ids[is_draft] = draft_token_ids[row_seq[is_draft], draft_index[is_draft]]

    return Batch(
        slots=slots,
        num_new_tokens=num_new_tokens,
        num_draft_tokens=num_draft_tokens,
        num_logits_rows=np.where(samples, 1 + num_draft_tokens, 0),
        cu_seqlens_q=rows.cu_seqlens_q,
        logits_rows=np.flatnonzero(samples[row_seq] & (draft_index >= -1)),
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        attention=attention_metadata(state, slots, rows, device),
    )


def lay_out_rows(
    slots: np.ndarray,  # [num_seqs] int64
    starts: np.ndarray,  # [num_seqs] int64: position of each sequence's first row
    num_rows: np.ndarray,  # [num_seqs] int64
) -> Rows:
    cu_seqlens_q = np.zeros(len(slots) + 1, dtype=np.int64)
    np.cumsum(num_rows, out=cu_seqlens_q[1:])
    num_tokens, max_seqlen_q = int(cu_seqlens_q[-1]), int(num_rows.max())
    if max_seqlen_q == 1 and num_tokens == len(slots):  # most of a drafter's passes: a row a sequence
        return Rows(cu_seqlens_q, np.arange(num_tokens), slots, starts, starts + 1, 1)
    row_seq = np.repeat(np.arange(len(slots)), num_rows)
    positions = np.arange(num_tokens) + (starts - cu_seqlens_q[:-1])[row_seq]
    return Rows(cu_seqlens_q, row_seq, slots[row_seq], positions, starts + num_rows, max_seqlen_q)


def attention_metadata(
    state: SequenceState,
    slots: np.ndarray,  # [num_seqs] int64, that the rows were laid out for
    rows: Rows,
    device: torch.device,
) -> AttentionMetadata:
    max_context_len = int(rows.context_lens.max())
    max_blocks = -(-max_context_len // state.block_size)
    return AttentionMetadata(
        cu_seqlens_q=to_device(rows.cu_seqlens_q.astype(np.int32), device),
        context_lens=to_device(rows.context_lens.astype(np.int32), device),
        block_tables=to_device(state.block_table[slots, :max_blocks], device),
        slot_mapping=to_device(state.slot_mapping(rows.slots, rows.positions), device),
        max_seqlen_q=rows.max_seqlen_q,
        max_context_len=max_context_len,
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def select_rows(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return tensor.index_select(0, to_device(rows, tensor.device))
