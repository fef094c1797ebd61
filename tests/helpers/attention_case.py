"""Ragged batches over a poisoned paged cache, and attention written out for each row."""

from dataclasses import dataclass

import torch

from kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class AttentionCase:
    """A batch; every cache entry that no row may read is nan."""

    query: torch.Tensor  # [T + padding rows, num_heads, D]
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor
    metadata: AttentionMetadata

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    def to(self, dtype: torch.dtype) -> "AttentionCase":
        return AttentionCase(self.query.to(dtype), self.key_cache.to(dtype), self.value_cache.to(dtype), self.metadata)

    def select(self, seqs: list[int]) -> "AttentionCase":
        """The same rows of some of the sequences, over the same cache, in the given order."""
        starts = self.metadata.cu_seqlens_q.tolist()
        rows = [row for seq in seqs for row in range(starts[seq], starts[seq + 1])]
        seqlens_q = [starts[seq + 1] - starts[seq] for seq in seqs]
        context_lens = self.metadata.context_lens[seqs]
        metadata = ragged_metadata(seqlens_q, context_lens, self.metadata.block_tables[seqs], self.query.device)
        return AttentionCase(self.query[rows], self.key_cache, self.value_cache, metadata)


def ragged_metadata(
    seqlens_q: list[int], context_lens: torch.Tensor, block_tables: torch.Tensor, device: torch.device | str
) -> AttentionMetadata:
    cu_seqlens_q = torch.tensor([0, *seqlens_q], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q.to(device),
        context_lens=context_lens.to(device),
        block_tables=block_tables.to(device),
        slot_mapping=torch.full((int(cu_seqlens_q[-1]),), -1, dtype=torch.int64, device=device),
        max_seqlen_q=max(seqlens_q),
        max_context_len=int(context_lens.max()),
    )


def make_case(
    seqlens: list[tuple[int, int]],  # (queries, context) of each sequence
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    num_padding_rows: int = 2,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    """A batch in fp32 whose block tables are shuffled over a pool with blocks to spare."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context // block_size) for _, context in seqlens]
    pool = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    cache_shape = (len(pool), block_size, num_kv_heads, head_dim)
    key_cache, value_cache = torch.full(cache_shape, torch.nan), torch.full(cache_shape, torch.nan)
    block_tables = torch.zeros((len(seqlens), max(1, *num_blocks)), dtype=torch.int32)
    for seq, (_, context) in enumerate(seqlens):
        for index in range(num_blocks[seq]):
            block = pool.pop()
            block_tables[seq, index] = block
            filled = min(block_size, context - index * block_size)
            for cache in (key_cache, value_cache):
                cache[block, :filled] = torch.randn((filled, num_kv_heads, head_dim), generator=generator)
    seqlens_q = [queries for queries, _ in seqlens]
    query = torch.randn((sum(seqlens_q) + num_padding_rows, num_heads, head_dim), generator=generator)
    context_lens = torch.tensor([context for _, context in seqlens], dtype=torch.int32)
    metadata = ragged_metadata(seqlens_q, context_lens, block_tables, device)
    return AttentionCase(query.to(device), key_cache.to(device), value_cache.to(device), metadata)


def attention_by_rows(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    """Each row and head by itself, in fp64, over the keys it may see; zeros for rows that see none."""
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    block_size, num_kv_heads = case.key_cache.shape[1:3]
    group = case.query.shape[1] // num_kv_heads
    starts = case.metadata.cu_seqlens_q.tolist()
    for seq, context in enumerate(case.metadata.context_lens.tolist()):
        for row in range(starts[seq], starts[seq + 1]):
            position = context - starts[seq + 1] + row
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            if position < 0:
                continue
            positions = torch.arange(first, position + 1, device=case.query.device)
            blocks = case.metadata.block_tables[seq, positions // block_size].long()
            keys = case.key_cache[blocks, positions % block_size].double()  # [L, num_kv_heads, D]
            values = case.value_cache[blocks, positions % block_size].double()
            for head in range(case.query.shape[1]):
                scores = keys[:, head // group] @ case.query[row, head].double() * case.scale
                out[row, head] = scores.softmax(0) @ values[:, head // group]
    return out
