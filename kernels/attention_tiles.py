"""Parts of the attention kernels, in Triton: whose tile this is, a tile's sums over keys, and joining such sums.

Softmax is taken in base 2: scores come scaled by log2(e). Sums over keys are triples per row: the maximum
score, the sum of exponentials below it, and the values weighted by these; a row that saw no key has
(-inf, 0, 0), which joins as nothing. Source: FlashAttention-2 (Dao, 2023, section 3.1).
"""

import triton
import triton.language as tl


@triton.jit
def find_tile_sequence(cu_seqlens_q, num_seqs, index, BLOCK_Q: tl.constexpr):
    """The sequence of a tile. Sequence i owns the tiles from cu_seqlens_q[i] // BLOCK_Q + i, enough for any length."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_row_sequence(cu_seqlens_q, num_seqs, row):
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) <= row:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def sum_keys(
    queries,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M] of the queries
    start,
    end,
    key_cache,  # at the KV head
    value_cache,
    block_table,  # at the sequence
    scale,
    key_stride_b,
    key_stride_s,
    value_stride_b,
    value_stride_s,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attention to the positions from `start`, a multiple of BLOCK_N, to `end`: maximum, sum, weighted values."""
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims[None, :] < HEAD_DIM
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(start, end, BLOCK_N):
        key_positions = tile + tl.arange(0, BLOCK_N)
        inside = key_positions < end
        blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offsets = (key_positions % BLOCK_SIZE).to(tl.int64)
        mask = inside[:, None] & dim_mask
        key_offsets = (blocks * key_stride_b + offsets * key_stride_s)[:, None] + dims[None, :]
        keys = tl.load(key_cache + key_offsets, mask=mask, other=0.0)
        value_offsets = (blocks * value_stride_b + offsets * value_stride_s)[:, None] + dims[None, :]
        values = tl.load(value_cache + value_offsets, mask=mask, other=0.0)

        seen = inside[None, :] & (key_positions[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (key_positions[None, :] > positions[:, None] - WINDOW)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None]
        weighted += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit
def sum_latents(
    query_latents,  # [BLOCK_M, BLOCK_V]
    query_rest,  # [BLOCK_M, BLOCK_R]
    positions,  # [BLOCK_M] of the queries
    start,
    end,
    latent_cache,
    block_table,  # at the sequence
    scale,
    cache_stride_b,
    cache_stride_s,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Attention to the positions from `start`, a multiple of BLOCK_N, to `end`: maximum, sum, weighted latents."""
    value_dims = tl.arange(0, BLOCK_V)
    rest_dims = tl.arange(0, BLOCK_R)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for tile in range(start, end, BLOCK_N):
        key_positions = tile + tl.arange(0, BLOCK_N)
        inside = key_positions < end
        blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offsets = (key_positions % BLOCK_SIZE).to(tl.int64)
        rows = latent_cache + (blocks * cache_stride_b + offsets * cache_stride_s)[:, None]
        latents = tl.load(
            rows + value_dims[None, :], mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM), other=0.0
        )
        rest = tl.load(
            rows + VALUE_DIM + rest_dims[None, :], mask=inside[:, None] & (rest_dims[None, :] < REST_DIM), other=0.0
        )
        scores = tl.dot(query_latents, tl.trans(latents), input_precision="ieee")
        scores += tl.dot(query_rest, tl.trans(rest), input_precision="ieee")
        seen = inside[None, :] & (key_positions[None, :] <= positions[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None]
        weighted += tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit
def merge_scales(maximum, split_maximum):
    """The common maximum of two sums of exponentials, and what brings each to it."""
    new_maximum = tl.maximum(maximum, split_maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return new_maximum, tl.exp2(maximum - base), tl.exp2(split_maximum - base)
