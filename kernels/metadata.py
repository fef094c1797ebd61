"""What a kernel over the paged KV cache must know of a ragged batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """Layout of one ragged batch: `num_seqs` sequences, `num_tokens` rows.

    Row `cu_seqlens_q[i] + j` is the j-th query of sequence i and stands at position
    `context_lens[i] - (cu_seqlens_q[i + 1] - cu_seqlens_q[i]) + j`; it attends to every
    position up to its own. Keys and values of the batch are stored before attention reads
    them, so `context_lens` counts the rows of this batch as well.
    """

    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32
    context_lens: torch.Tensor  # [num_seqs] int32
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; entries past a sequence's end are 0
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + offset; -1 = padding, not stored
    max_seqlen_q: int
    max_context_len: int
