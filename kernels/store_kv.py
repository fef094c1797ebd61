"""Storing new keys and values in the paged cache, in Triton.

Row t goes to slot_mapping[t] = block * block_size + offset of both caches; -1 stores nothing.

Layouts: key, value [T, num_kv_heads, D], any row and head stride; caches [num_blocks, block_size,
num_kv_heads, D], any strides but of the last dimension.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    key_cache_stride_b,
    key_cache_stride_s,
    key_cache_stride_h,
    value_cache_stride_b,
    value_cache_stride_s,
    value_cache_stride_h,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, blocks of a row's num_kv_heads * D entries)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < NUM_HEADS * HEAD_DIM
    heads = entries // HEAD_DIM
    dims = entries % HEAD_DIM
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    keys = tl.load(key + row * key_stride_t + heads * key_stride_h + dims, mask=mask)
    key_slot = key_cache + block * key_cache_stride_b + offset * key_cache_stride_s
    tl.store(key_slot + heads * key_cache_stride_h + dims, keys, mask=mask)
    values = tl.load(value + row * value_stride_t + heads * value_stride_h + dims, mask=mask)
    value_slot = value_cache + block * value_cache_stride_b + offset * value_cache_stride_s
    tl.store(value_slot + heads * value_cache_stride_h + dims, values, mask=mask)


def store_kv(
    key: torch.Tensor,  # [T, num_kv_heads, D]
    value: torch.Tensor,  # [T, num_kv_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    """Twin: `kernels.reference.store_kv`."""
    num_tokens, num_heads, head_dim = key.shape
    block_size = key_cache.shape[1]
    assert key.shape == value.shape
    assert key_cache.shape == value_cache.shape
    assert key_cache.shape[2:] == (num_heads, head_dim)
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.stride(0) == 1
    assert key.stride(2) == value.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    if num_tokens == 0:
        return
    block = min(1024, triton.next_power_of_2(num_heads * head_dim))
    _store_kv_kernel[(num_tokens, triton.cdiv(num_heads * head_dim, block))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK=block,
    )
