"""Ragged attention over the paged KV cache, in Triton.

Computes softmax(scale * query key^T) value, causal, for prompt chunks, decodes and verifications in one
launch. A tile is up to BLOCK_M rows of one sequence and one KV head: the query heads that share a KV head
(GROUP) lie side by side, so that a verification of 1 + k queries fills rows of a tensor-core tile.

A row's sums depend on its own sequence alone, never on its batch mates. Keys are cut at fixed positions:
every BLOCK_N of them into tiles and, for a sequence whose queries fit one tile, every SPLIT_LEN into
splits, which are summed apart and then merged in order. Where programs are few, each split has a program
of its own and `_merge_kernel` joins them; else one program does it all. Both take the same sums.

Layouts: query, out [T, num_heads, D]; caches [num_blocks, block_size, num_kv_heads, D], the last dimension
dense; the rest as in AttentionMetadata. Sources: FlashAttention-2 (Dao, 2023, algorithm 1) and
Flash-Decoding (Dao et al., 2023), with splits of fixed length where that balances them over the device.
"""

import torch
import triton
import triton.language as tl

from kernels.attention_tiles import find_row_sequence, find_tile_sequence, merge_scales, sum_keys
from kernels.metadata import AttentionMetadata

MIN_BLOCK_M = 64
SPLIT_LEN = 512
# With fewer programs than this a device of some hundred multiprocessors stands half idle.
FEW_PROGRAMS = 512
NUM_WARPS = 8
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "table_stride"])  # they vary with the batch
def _attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    split_out,  # [T, num_heads, num_splits, D] fp32, where HAS_SPLITS
    split_stats,  # [T, num_heads, num_splits, 2] fp32: maximum and sum, where HAS_SPLITS
    cu_seqlens_q,
    context_lens,
    block_tables,
    num_seqs,
    num_heads,
    num_splits,
    scale,
    query_stride_t,
    query_stride_h,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    value_stride_b,
    value_stride_s,
    value_stride_h,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
):
    """Grid (tiles, num_kv_heads, num_splits), or (tiles, num_kv_heads) without HAS_SPLITS."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_tile_sequence(cu_seqlens_q, num_seqs, tile, BLOCK_Q)
    first_row = tl.load(cu_seqlens_q + seq)
    seqlen_q = tl.load(cu_seqlens_q + seq + 1) - first_row
    first_query = (tile - first_row // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= seqlen_q:
        return
    first_position = tl.load(context_lens + seq) - seqlen_q
    end = first_position + tl.minimum(first_query + BLOCK_Q, seqlen_q)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first_position + first_query - WINDOW + 1, 0)

    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries_of_m = first_query + m // GROUP
    row_mask = (m // GROUP < BLOCK_Q) & (queries_of_m < seqlen_q)
    mask = row_mask[:, None] & (dims[None, :] < HEAD_DIM)
    rows = (first_row + queries_of_m).to(tl.int64)
    heads = kv_head * GROUP + m % GROUP
    query_offsets = (rows * query_stride_t + heads * query_stride_h)[:, None] + dims[None, :]
    queries = tl.load(query + query_offsets, mask=mask, other=0.0)
    positions = first_position + queries_of_m
    keys_of_head = key_cache + kv_head.to(tl.int64) * key_stride_h
    values_of_head = value_cache + kv_head.to(tl.int64) * value_stride_h
    block_table = block_tables + seq.to(tl.int64) * table_stride

    if HAS_SPLITS:
        split = tl.program_id(2)
        split_start = split * SPLIT
        if (split_start >= end) | (split_start + SPLIT <= start):
            return
        maximum, total, weighted = sum_keys(
            queries, positions, tl.maximum(split_start, start // BLOCK_N * BLOCK_N),
            tl.minimum(split_start + SPLIT, end), keys_of_head, values_of_head, block_table, scale,
            key_stride_b, key_stride_s, value_stride_b, value_stride_s,
            HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE, WINDOW,
        )  # fmt: skip
        splits = (rows * num_heads + heads) * num_splits + split
        tl.store(split_out + splits[:, None] * HEAD_DIM + dims[None, :], weighted, mask=mask)
        tl.store(split_stats + splits * 2, maximum, mask=row_mask)
        tl.store(split_stats + splits * 2 + 1, total, mask=row_mask)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        # A prompt's chunk has programs enough: its keys are one split.
        split_len = tl.where(seqlen_q <= BLOCK_Q, SPLIT, 1 << 30)
        for split_start in range(start // split_len * split_len, end, split_len):
            split_maximum, split_total, split_weighted = sum_keys(
                queries, positions, tl.maximum(split_start, start // BLOCK_N * BLOCK_N),
                tl.minimum(split_start + split_len, end), keys_of_head, values_of_head, block_table, scale,
                key_stride_b, key_stride_s, value_stride_b, value_stride_s,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE, WINDOW,
            )  # fmt: skip
            maximum, decay, split_decay = merge_scales(maximum, split_maximum)
            total = total * decay + split_total * split_decay
            weighted = weighted * decay[:, None] + split_weighted * split_decay[:, None]
        attended = weighted / tl.where(total > 0, total, 1.0)[:, None]
        out_offsets = ((rows * num_heads + heads) * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def _merge_kernel(
    out,  # [T, num_heads, D]
    split_out,  # [T, num_heads, num_splits, D] fp32
    split_stats,  # [T, num_heads, num_splits, 2] fp32
    cu_seqlens_q,
    context_lens,
    num_seqs,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (T, num_heads): joins the splits that `_attention_kernel` has written for a row and head."""
    row = tl.program_id(0)
    seq = find_row_sequence(cu_seqlens_q, num_seqs, row)
    first_row = tl.load(cu_seqlens_q + seq)
    end_row = tl.load(cu_seqlens_q + seq + 1)
    if row >= end_row:
        return
    end = tl.load(context_lens + seq)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(end - (end_row - first_row) - WINDOW + 1, 0)

    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    row_head = row.to(tl.int64) * num_heads + tl.program_id(1)
    maximum = float("-inf")
    total = 0.0
    weighted = tl.zeros([BLOCK_D], tl.float32)
    for split in range(start // SPLIT, (end + SPLIT - 1) // SPLIT):
        index = row_head * num_splits + split
        split_maximum = tl.load(split_stats + index * 2)
        split_total = tl.load(split_stats + index * 2 + 1)
        split_weighted = tl.load(split_out + index * HEAD_DIM + dims, mask=dim_mask, other=0.0)
        maximum, decay, split_decay = merge_scales(maximum, split_maximum)
        total = total * decay + split_total * split_decay
        weighted = weighted * decay + split_weighted * split_decay
    attended = weighted / tl.where(total > 0, total, 1.0)
    tl.store(out + row_head * HEAD_DIM + dims, attended.to(out.dtype.element_ty), mask=dim_mask)


def paged_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads, D]
    """Twin: `kernels.reference_attention.paged_attention`."""
    group = query.shape[1] // key_cache.shape[2]
    one_tile = metadata.max_seqlen_q <= _block_m(group) // group
    few_programs = len(metadata.context_lens) * key_cache.shape[2] < FEW_PROGRAMS
    spread = one_tile and few_programs and metadata.max_context_len > SPLIT_LEN
    return launch_attention(query, key_cache, value_cache, metadata, scale, sliding_window, spread)


def launch_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    spread: bool,
) -> torch.Tensor:
    """`paged_attention` with one program a split (`spread`) or one for all splits; the results are the same.

    Only a batch whose sequences each fit one tile can be spread.
    """
    _check(query, key_cache, value_cache, metadata, sliding_window)
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_seqs = len(metadata.context_lens)
    group = num_heads // num_kv_heads
    block_q = _block_m(group) // group
    assert not spread or metadata.max_seqlen_q <= block_q

    # Rows that no sequence owns have no program.
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    num_splits = -(-metadata.max_context_len // SPLIT_LEN) if spread else 1
    split_out = split_stats = out  # placeholders unless spread
    if spread:
        shape = (num_tokens, num_heads, num_splits)
        split_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        split_stats = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    _attention_kernel[(num_tokens // block_q + num_seqs, num_kv_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        out,
        split_out,
        split_stats,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        metadata.block_tables,
        num_seqs,
        num_heads,
        num_splits,
        scale * LOG2_E,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        metadata.block_tables.stride(0),
        **attention_constants(group, head_dim, block_size, sliding_window, query.dtype, spread),
        num_warps=NUM_WARPS,
    )
    if spread:
        _merge_kernel[(num_tokens, num_heads)](
            out,
            split_out,
            split_stats,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            num_seqs,
            num_heads,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=_block_d(head_dim),
            SPLIT=SPLIT_LEN,
            WINDOW=sliding_window or 0,
        )
    return out


def attention_constants(
    group: int,
    head_dim: int,
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    spread: bool,
) -> dict[str, int | bool]:
    """Compile-time parameters of `_attention_kernel`; nothing of the batch, lest a row's sums change with its mates."""
    block_d = _block_d(head_dim)
    # So much of keys and values that the sums stay in registers (8 warps, compute capability 8.0 to 10.0).
    block_n = (64 if block_d <= 128 else 32) // (2 if dtype == torch.float32 else 1)
    assert SPLIT_LEN % block_n == 0
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": _block_m(group),
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": block_size,
        "SPLIT": SPLIT_LEN,
        "WINDOW": sliding_window or 0,
        "HAS_SPLITS": spread,
    }


def _block_m(group: int) -> int:
    return max(MIN_BLOCK_M, triton.next_power_of_2(group))


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    sliding_window: int | None,
) -> None:
    _, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    num_seqs = len(metadata.context_lens)
    assert key_cache.shape == value_cache.shape
    assert key_cache.shape[3] == head_dim
    assert num_heads % num_kv_heads == 0
    assert query.dtype == key_cache.dtype == value_cache.dtype
    assert query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    assert metadata.cu_seqlens_q.shape == (num_seqs + 1,)
    assert metadata.block_tables.shape[0] == num_seqs
    assert metadata.block_tables.stride(1) == 1
    assert sliding_window is None or sliding_window > 0
