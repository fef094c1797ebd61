"""Ragged attention of all heads to a paged cache of latents, in Triton.

Computes softmax(scale * query latent^T) latent[:value_dim], causal: multi-head latent attention in its absorbed
form (DeepSeek-V2, arXiv 2405.04434, section 2.1), where a token's one latent is key and value of every head. A
tile is BLOCK_M rows of one sequence, a row being one head of one query, so that a latent is read once for them.

Latents are cut at fixed positions: every BLOCK_N of them into tiles and every SPLIT_LEN into splits, which are
summed apart and then merged in order. Where programs are few, each split has a program of its own and
`_merge_kernel` joins them; else one program does it all. Both take the same sums, so a row's result depends on
its own sequence alone, and a verification gives what decodes one by one do.

Layouts: query, out [T, num_heads, ...]; cache [num_blocks, block_size, D], the last dimension dense; the rest as
in AttentionMetadata. Sources: as `kernels.paged_attention`.
"""

import torch
import triton
import triton.language as tl

from kernels.attention_tiles import find_row_sequence, merge_scales, sum_latents
from kernels.metadata import AttentionMetadata

SPLIT_LEN = 512
# With fewer programs than this a device of some hundred multiprocessors stands half idle.
FEW_PROGRAMS = 512
NUM_WARPS = 8
LOG2_E = 1.4426950408889634


@triton.jit
def _find_tile_sequence(cu_seqlens_q, num_seqs, num_heads, index, BLOCK_M: tl.constexpr):
    """Sequence i owns the tiles from cu_seqlens_q[i] * num_heads // BLOCK_M + i, enough for any length."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) * num_heads // BLOCK_M + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "table_stride"])  # they vary with the batch
def _latent_attention_kernel(
    query,
    latent_cache,
    out,
    split_out,  # [T, num_heads, num_splits, VALUE_DIM] fp32, where HAS_SPLITS
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
    cache_stride_b,
    cache_stride_s,
    table_stride,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
):
    """Grid (tiles, num_splits), or (tiles,) without HAS_SPLITS."""
    tile = tl.program_id(0)
    seq = _find_tile_sequence(cu_seqlens_q, num_seqs, num_heads, tile, BLOCK_M)
    first_row = tl.load(cu_seqlens_q + seq)
    seqlen_q = tl.load(cu_seqlens_q + seq + 1) - first_row
    first_m = (tile - first_row * num_heads // BLOCK_M - seq) * BLOCK_M
    if first_m >= seqlen_q * num_heads:
        return
    first_position = tl.load(context_lens + seq) - seqlen_q
    last_query = tl.minimum(first_m + BLOCK_M - 1, seqlen_q * num_heads - 1) // num_heads
    end = first_position + last_query + 1

    m = first_m + tl.arange(0, BLOCK_M)
    row_mask = m < seqlen_q * num_heads
    rows = (first_row + m // num_heads).to(tl.int64)
    heads = m % num_heads
    positions = first_position + m // num_heads
    value_dims = tl.arange(0, BLOCK_V)
    rest_dims = tl.arange(0, BLOCK_R)
    value_mask = row_mask[:, None] & (value_dims[None, :] < VALUE_DIM)
    query_rows = query + (rows * query_stride_t + heads * query_stride_h)[:, None]
    query_latents = tl.load(query_rows + value_dims[None, :], mask=value_mask, other=0.0)
    query_rest = tl.load(
        query_rows + VALUE_DIM + rest_dims[None, :], mask=row_mask[:, None] & (rest_dims[None, :] < REST_DIM), other=0.0
    )
    block_table = block_tables + seq.to(tl.int64) * table_stride

    if HAS_SPLITS:
        split = tl.program_id(1)
        if split * SPLIT >= end:
            return
        maximum, total, weighted = sum_latents(
            query_latents, query_rest, positions, split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end),
            latent_cache, block_table, scale, cache_stride_b, cache_stride_s,
            VALUE_DIM, REST_DIM, BLOCK_M, BLOCK_N, BLOCK_V, BLOCK_R, BLOCK_SIZE,
        )  # fmt: skip
        splits = (rows * num_heads + heads) * num_splits + split
        tl.store(split_out + splits[:, None] * VALUE_DIM + value_dims[None, :], weighted, mask=value_mask)
        tl.store(split_stats + splits * 2, maximum, mask=row_mask)
        tl.store(split_stats + splits * 2 + 1, total, mask=row_mask)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for split_start in range(0, end, SPLIT):
            split_maximum, split_total, split_weighted = sum_latents(
                query_latents, query_rest, positions, split_start, tl.minimum(split_start + SPLIT, end),
                latent_cache, block_table, scale, cache_stride_b, cache_stride_s,
                VALUE_DIM, REST_DIM, BLOCK_M, BLOCK_N, BLOCK_V, BLOCK_R, BLOCK_SIZE,
            )  # fmt: skip
            maximum, decay, split_decay = merge_scales(maximum, split_maximum)
            total = total * decay + split_total * split_decay
            weighted = weighted * decay[:, None] + split_weighted * split_decay[:, None]
        attended = weighted / tl.where(total > 0, total, 1.0)[:, None]
        out_offsets = ((rows * num_heads + heads) * VALUE_DIM)[:, None] + value_dims[None, :]
        tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=value_mask)


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def _merge_latents_kernel(
    out,  # [T, num_heads, VALUE_DIM]
    split_out,  # [T, num_heads, num_splits, VALUE_DIM] fp32
    split_stats,  # [T, num_heads, num_splits, 2] fp32
    cu_seqlens_q,
    context_lens,
    num_seqs,
    num_heads,
    num_splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (T, num_heads): joins the splits up to a row's own position."""
    row = tl.program_id(0)
    seq = find_row_sequence(cu_seqlens_q, num_seqs, row)
    end_row = tl.load(cu_seqlens_q + seq + 1)
    if row >= end_row:
        return
    end = tl.load(context_lens + seq) - (end_row - row) + 1
    dims = tl.arange(0, BLOCK_V)
    mask = dims < VALUE_DIM
    row_head = row.to(tl.int64) * num_heads + tl.program_id(1)
    maximum = float("-inf")
    total = 0.0
    weighted = tl.zeros([BLOCK_V], tl.float32)
    for split in range((end + SPLIT - 1) // SPLIT):
        index = row_head * num_splits + split
        split_maximum = tl.load(split_stats + index * 2)
        split_total = tl.load(split_stats + index * 2 + 1)
        split_weighted = tl.load(split_out + index * VALUE_DIM + dims, mask=mask, other=0.0)
        maximum, decay, split_decay = merge_scales(maximum, split_maximum)
        total = total * decay + split_total * split_decay
        weighted = weighted * decay + split_weighted * split_decay
    attended = weighted / tl.where(total > 0, total, 1.0)
    tl.store(out + row_head * VALUE_DIM + dims, attended.to(out.dtype.element_ty), mask=mask)


def latent_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    metadata: AttentionMetadata,
    scale: float,
    value_dim: int,
) -> torch.Tensor:  # [T, num_heads, value_dim]
    """Twin: `kernels.reference_latent.latent_attention`."""
    num_programs = query.shape[0] * query.shape[1] // _block_m(query.dtype) + len(metadata.context_lens)
    spread = num_programs < FEW_PROGRAMS and metadata.max_context_len > SPLIT_LEN
    return launch_latent_attention(query, latent_cache, metadata, scale, value_dim, spread)


def launch_latent_attention(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    value_dim: int,
    spread: bool,
) -> torch.Tensor:
    """`latent_attention` with one program a split (`spread`) or one for all splits; the results are the same."""
    num_tokens, num_heads, width = query.shape
    num_seqs, block_size = len(metadata.context_lens), latent_cache.shape[1]
    assert latent_cache.shape[2] == width
    assert value_dim < width
    assert query.dtype == latent_cache.dtype
    assert query.stride(2) == latent_cache.stride(2) == 1
    assert metadata.cu_seqlens_q.shape == (num_seqs + 1,)
    assert metadata.block_tables.shape[0] == num_seqs
    assert metadata.block_tables.stride(1) == 1
    # Rows that no sequence owns have no program.
    out = torch.zeros((num_tokens, num_heads, value_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    num_splits = -(-metadata.max_context_len // SPLIT_LEN) if spread else 1
    split_out = split_stats = out  # placeholders unless spread
    if spread:
        shape = (num_tokens, num_heads, num_splits)
        split_out = torch.empty((*shape, value_dim), dtype=torch.float32, device=query.device)
        split_stats = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    constants = latent_constants(width, value_dim, block_size, query.dtype)
    num_tiles = num_tokens * num_heads // constants["BLOCK_M"] + num_seqs
    _latent_attention_kernel[(num_tiles, num_splits)](
        query,
        latent_cache,
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
        *latent_cache.stride()[:2],
        metadata.block_tables.stride(0),
        **constants,
        HAS_SPLITS=spread,
        num_warps=NUM_WARPS,
        num_stages=2,
    )
    if spread:
        _merge_latents_kernel[(num_tokens, num_heads)](
            out,
            split_out,
            split_stats,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            num_seqs,
            num_heads,
            num_splits,
            VALUE_DIM=value_dim,
            BLOCK_V=constants["BLOCK_V"],
            SPLIT=SPLIT_LEN,
        )
    return out


def latent_constants(width: int, value_dim: int, block_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of `_latent_attention_kernel`; nothing of the batch, lest a row's sums change."""
    # So few latents that two stages of them fit the shared memory of compute capability 8.6 (99 KiB) at DeepSeek's
    # width, and so few rows that two sums of BLOCK_V entries stay in registers.
    block_n = 16 if dtype == torch.float32 else 32
    assert SPLIT_LEN % block_n == 0
    return {
        "VALUE_DIM": value_dim,
        "REST_DIM": width - value_dim,
        "BLOCK_M": _block_m(dtype),
        "BLOCK_N": block_n,
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_R": max(16, triton.next_power_of_2(width - value_dim)),
        "BLOCK_SIZE": block_size,
        "SPLIT": SPLIT_LEN,
    }


def _block_m(dtype: torch.dtype) -> int:
    return 16 if dtype == torch.float32 else 32
