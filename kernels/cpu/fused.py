"""Launchers of several kernels in one call, bit for bit what their separate calls give.

A step of a small model is hundreds of calls of a few microseconds, and as much again goes into making each of them.
"""

import torch

from kernels import reference
from kernels.cpu.calls import as_rows, check_memory, functions, loaded_library
from kernels.cpu.threads import num_threads
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import PackedWeight, Weight

BLOCK_COLUMNS = 32  # NB in dot_tile.h


def linear_silu_and_mul(
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [2 * I, K], of x's dtype: gate, then up
) -> torch.Tensor:  # [..., I]
    if not isinstance(weight, PackedWeight):
        return reference.silu_and_mul(reference.linear(x, weight))
    rows = as_rows(x)
    num_rows, num_columns = rows.shape
    width, is_float = weight.num_rows // 2, x.dtype == torch.float32
    library = loaded_library().released
    linear = library.linear_float if is_float else library.linear_bf16
    assert num_columns == weight.num_columns
    assert weight.data.dtype == x.dtype
    # Gate and up are computed side by side if both start at a block.
    gated = width % BLOCK_COLUMNS == 0
    product = torch.empty(num_rows, width if gated else 2 * width, dtype=x.dtype)
    if num_rows:
        check_memory(
            linear(
                num_threads(),
                num_rows,
                product.shape[1],
                num_columns,
                rows.data_ptr(),
                rows.stride(0),
                weight.data.data_ptr(),
                None,
                product.data_ptr(),
                is_float,
                gated,
            )
        )
    out = product if gated else torch.empty(num_rows, width, dtype=x.dtype)
    if not gated:
        library.silu_and_mul(num_threads(), num_rows, width, is_float, product.data_ptr(), 2 * width, out.data_ptr())
    return out if x is rows else out.view(*x.shape[:-1], width)


def join_norms(
    x: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    second: torch.Tensor,  # [T, H]
    second_weight: torch.Tensor,  # [H]
    eps: float,
    positions: torch.Tensor,  # [T] int64
    second_leads: bool,
) -> torch.Tensor:  # [T, 2 * H]
    num_rows, width = x.shape
    x, second = as_rows(x), as_rows(second)
    assert second.shape == x.shape
    assert weight.shape == second_weight.shape == (width,)
    assert x.dtype == second.dtype == weight.dtype == second_weight.dtype
    assert weight.is_contiguous()
    assert second_weight.is_contiguous()
    assert positions.dtype == torch.int64
    assert positions.shape == (num_rows,)
    assert positions.is_contiguous()
    out = torch.empty(num_rows, 2 * width, dtype=x.dtype)
    functions(num_rows).join_norms(
        num_threads(),
        num_rows,
        width,
        x.dtype == torch.float32,
        second_leads,
        eps,
        positions.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        second.data_ptr(),
        second.stride(0),
        second_weight.data_ptr(),
        out.data_ptr(),
    )
    return out


def qkv_attention(
    positions: torch.Tensor,  # [T] int64
    qkv: torch.Tensor,  # [T, (num_heads + 2 * num_kv_heads) * D]; queries and keys are overwritten
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] fp32: cosines, then sines
    interleaved: bool,
    query_norm: torch.Tensor | None,  # [D]: RMSNorm of every query head
    key_norm: torch.Tensor | None,  # [D]
    eps: float,
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads * D]
    """Norms of the heads, rotary embedding, keys and values into their slots, attention."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    num_tokens, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    is_float = qkv.dtype == torch.float32
    max_position, rotary_dim = cos_sin_cache.shape
    cu_seqlens_q, context_lens, block_tables = metadata.cu_seqlens_q, metadata.context_lens, metadata.block_tables
    slots = metadata.slot_mapping
    assert width == (num_heads + 2 * num_kv_heads) * head_dim
    assert num_heads % num_kv_heads == 0
    assert is_float or head_dim % 2 == 0
    assert qkv.stride(1) == 1
    assert key_cache.dtype == value_cache.dtype == qkv.dtype
    assert key_cache.shape == value_cache.shape
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert positions.dtype == slots.dtype == torch.int64
    assert positions.shape == slots.shape == (num_tokens,)
    assert positions.is_contiguous()
    assert slots.is_contiguous()
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    assert rotary_dim <= head_dim
    assert query_norm is None or (query_norm.dtype == qkv.dtype and query_norm.shape == (head_dim,))
    assert key_norm is None or (key_norm.dtype == qkv.dtype and key_norm.shape == (head_dim,))
    assert cu_seqlens_q.dtype == context_lens.dtype == block_tables.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert context_lens.is_contiguous()
    assert block_tables.stride(1) == 1
    assert metadata.max_context_len <= block_tables.shape[1] * block_size
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=qkv.dtype)
    refused = loaded_library().released.qkv_attention(
        num_threads(),
        num_tokens,
        context_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim,
        block_size,
        num_blocks,
        sliding_window or 0,
        is_float,
        interleaved,
        scale,
        eps,
        positions.data_ptr(),
        qkv.data_ptr(),
        qkv.stride(0),
        None if query_norm is None else query_norm.data_ptr(),
        None if key_norm is None else key_norm.data_ptr(),
        cos_sin_cache.data_ptr(),
        max_position,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        cu_seqlens_q.data_ptr(),
        context_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        out.data_ptr(),
    )
    if refused == 1:
        raise IndexError(f"a position lies outside of 0..{max_position - 1}")
    if refused == 2:
        raise IndexError(f"a slot lies outside of 0..{num_blocks * block_size - 1}")
    check_memory(refused)
    return out
