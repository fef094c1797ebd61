"""Rotary position embedding of queries and keys, in place, in Triton.

Rotates pair i of every head's first rotary_dim entries by the angle whose cosine and sine stand at
cos_sin_cache[position, i] and [position, rotary_dim / 2 + i]. A pair is (i, i + rotary_dim / 2), or
(2i, 2i + 1) where interleaved.

Layouts: query [T, num_heads, D] and key [T, num_kv_heads, D], any row and head stride (they may be views of
one projection); cos_sin_cache [max_position, rotary_dim] fp32. Source: Su et al., 2021, section 3.4.2.
"""

import torch
import triton
import triton.language as tl

BLOCK_H = 8


@triton.jit
def _rotate(x_row, heads, mask, cos, sin, stride_h, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    pairs = tl.arange(0, BLOCK)
    if INTERLEAVED:
        first = heads[:, None] * stride_h + 2 * pairs[None, :]
        second = first + 1
    else:
        first = heads[:, None] * stride_h + pairs[None, :]
        second = first + HALF
    x = tl.load(x_row + first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_row + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_row + first, (x * cos - y * sin).to(x_row.dtype.element_ty), mask=mask)
    tl.store(x_row + second, (y * cos + x * sin).to(x_row.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    positions,
    query,
    key,
    cos_sin_cache,
    num_heads,
    num_kv_heads,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    cache_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Grid (T, blocks of the query's heads, then the key's)."""
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK)
    angles = cos_sin_cache + tl.load(positions + row) * cache_stride
    cos = tl.load(angles + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (heads < num_heads)[:, None] & (pairs < HALF)[None, :]
    _rotate(query + row * query_stride_t, heads, mask, cos, sin, query_stride_h, HALF, BLOCK, INTERLEAVED)
    heads -= num_heads
    mask = ((heads >= 0) & (heads < num_kv_heads))[:, None] & (pairs < HALF)[None, :]
    _rotate(key + row * key_stride_t, heads, mask, cos, sin, key_stride_h, HALF, BLOCK, INTERLEAVED)


def rotary_embedding(
    positions: torch.Tensor,  # [T] int64
    query: torch.Tensor,  # [T, num_heads, D]; overwritten
    key: torch.Tensor,  # [T, num_kv_heads, D]; overwritten
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] fp32: cosines, then sines
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin: `kernels.reference.rotary_embedding`. Returns query and key themselves."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rotary_dim = cos_sin_cache.shape[1]
    assert key.shape == (num_tokens, num_kv_heads, head_dim)
    assert positions.shape == (num_tokens,)
    assert positions.dtype == torch.int64
    assert positions.stride(0) == 1
    assert cos_sin_cache.dtype == torch.float32
    assert rotary_dim <= head_dim
    assert rotary_dim % 2 == 0
    assert query.stride(2) == key.stride(2) == cos_sin_cache.stride(1) == 1
    if num_tokens > 0:
        _rotary_kernel[(num_tokens, triton.cdiv(num_heads + num_kv_heads, BLOCK_H))](
            positions,
            query,
            key,
            cos_sin_cache,
            num_heads,
            num_kv_heads,
            *query.stride()[:2],
            *key.stride()[:2],
            cos_sin_cache.stride(0),
            HALF=rotary_dim // 2,
            BLOCK=triton.next_power_of_2(rotary_dim // 2),
            BLOCK_H=BLOCK_H,
            INTERLEAVED=interleaved,
        )
    return query, key
