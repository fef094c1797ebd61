"""What a kernel over the paged KV cache must know of a ragged batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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

    @cached_property
    def host_lens(self) -> tuple[list[int], list[int]]:
        """Rows and context length of every sequence. On a GPU the first reader waits for it, once a batch."""
        return self.cu_seqlens_q.diff().tolist(), self.context_lens.tolist()

    def select(self, seqs: Sequence[int]) -> tuple[torch.Tensor, "AttentionMetadata"]:
        """The rows of some sequences, in order, and the layout of a batch of these alone."""
        all_num_rows, all_context_lens = self.host_lens
        num_rows, context_lens = [all_num_rows[seq] for seq in seqs], [all_context_lens[seq] for seq in seqs]
        device = self.context_lens.device
        starts = torch.tensor(all_num_rows).cumsum(0) - torch.tensor(all_num_rows)
        rows = torch.cat([torch.arange(int(starts[seq]), int(starts[seq]) + all_num_rows[seq]) for seq in seqs])
        rows = rows.to(device)
        index = torch.tensor(seqs, device=device)
        selected = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *num_rows], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            context_lens=self.context_lens[index],
            block_tables=self.block_tables[index],
            slot_mapping=self.slot_mapping[rows],
            max_seqlen_q=max(num_rows),
            max_context_len=max(context_lens),
        )
        return rows, selected

    def with_own_blocks(self, num_blocks: int) -> "AttentionMetadata":
        """The same sequence, the only one, over a cache that holds its blocks in order and nothing else."""
        assert len(self.context_lens) == 1
        blocks = torch.arange(num_blocks, dtype=torch.int32, device=self.block_tables.device)
        return replace(self, block_tables=blocks.unsqueeze(0))
