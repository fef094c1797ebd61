"""Launchers of the compiled CPU kernels: shapes and types are checked here, then only addresses are passed.

bf16 and fp32. Every kernel is row-invariant: the result of a row is the same bit for bit whatever
other rows a call has (the heads of the C files say how).
"""

import ctypes

import torch

from kernels import reference
from kernels.cpu.library import Library, load_library
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import PackedWeight, Weight

BLOCK_COLUMNS = 32  # NB in dot_tile.h
# Calls of at most so many rows keep Python's lock: they are over sooner than another thread would return it.
MAX_HELD_ROWS = 64


def is_available() -> bool:
    return load_library() is not None


def pack_weight(
    weight: torch.Tensor,  # [N, K]
) -> PackedWeight:
    """Blocks of 32 outputs side by side: fp32 [N/32, K, 32], bf16 [N/32, K/2, 32, 2], padded with zeros."""
    num_rows, num_columns = weight.shape
    depth = 2 if weight.dtype == torch.bfloat16 else 1
    blocks, steps = -(-num_rows // BLOCK_COLUMNS), -(-num_columns // depth)
    padded = torch.zeros((blocks * BLOCK_COLUMNS, steps * depth), dtype=weight.dtype)
    padded[:num_rows, :num_columns] = weight
    data = padded.view(blocks, BLOCK_COLUMNS, steps, depth).transpose(1, 2).contiguous()
    return PackedWeight(data, num_rows, num_columns)


def linear(
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [N, K], of x's dtype
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [..., N]
    if not isinstance(weight, PackedWeight):
        return reference.linear(x, weight, bias, out_dtype)
    rows = _rows(x)
    num_rows, num_columns = rows.shape
    is_float = x.dtype == torch.float32
    data = weight.data
    assert num_columns == weight.num_columns
    assert data.dtype == x.dtype
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    shape = (num_rows, weight.num_rows) if x is rows else (*x.shape[:-1], weight.num_rows)
    out = torch.empty(shape, dtype=out_dtype or x.dtype)
    assert out.dtype == x.dtype or out.dtype in (torch.float32, torch.bfloat16)
    if not num_rows:
        return out
    library = _library().released
    failed = (library.linear_float if is_float else library.linear_bf16)(
        torch.get_num_threads(),
        num_rows,
        weight.num_rows,
        num_columns,
        rows.data_ptr(),
        rows.stride(0),
        data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.dtype == torch.float32,
    )
    _check_memory(failed)
    return out


def embedding(
    token_ids: torch.Tensor,  # [T] int64
    weight: Weight,  # [N, K]
) -> torch.Tensor:  # [T, K]
    if not isinstance(weight, PackedWeight):
        return reference.embedding(token_ids, weight)
    ids = token_ids.long().contiguous()
    num_tokens = ids.numel()
    out = torch.empty((*ids.shape, weight.num_columns), dtype=weight.dtype)
    is_float = weight.dtype == torch.float32
    out_of_range = _functions(num_tokens).embedding(
        num_tokens,
        weight.num_rows,
        weight.num_columns,
        is_float,
        ids.data_ptr(),
        weight.data.data_ptr(),
        out.data_ptr(),
    )
    if out_of_range:
        raise IndexError(f"a token id lies outside of 0..{weight.num_rows - 1}")
    return out


def rms_norm(
    x: torch.Tensor,  # [..., H]
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    return _norm(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor,  # [..., H]
    residual: torch.Tensor,  # [..., H]; overwritten if contiguous
    weight: torch.Tensor,  # [H]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual)."""
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    residual = residual.contiguous()
    return _norm(x, residual, weight, eps), residual


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = _rows(x)
    num_rows, width = rows.shape
    assert weight.shape == (width,)
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _functions(num_rows).rms_norm(
        torch.get_num_threads(),
        num_rows,
        width,
        x.dtype == torch.float32,
        rows.data_ptr(),
        rows.stride(0),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        eps,
    )
    return out


def silu_and_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
) -> torch.Tensor:  # [T, I]
    rows = _rows(gate_up)
    num_rows, width = rows.shape
    assert width % 2 == 0
    out = torch.empty((*gate_up.shape[:-1], width // 2), dtype=gate_up.dtype)
    _functions(num_rows).silu_and_mul(
        torch.get_num_threads(),
        num_rows,
        width // 2,
        gate_up.dtype == torch.float32,
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
    )
    return out


def rotary_embedding(
    positions: torch.Tensor,  # [T] int64
    query: torch.Tensor,  # [T, num_heads, D]; overwritten if the heads of a token are contiguous
    key: torch.Tensor,  # [T, num_kv_heads, D]; likewise
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] fp32: cosines, then sines
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = _token_rows(query), _token_rows(key)
    num_tokens, num_heads, head_dim = query.shape
    rotary_dim = cos_sin_cache.shape[1]
    assert positions.dtype == torch.int64
    assert positions.is_contiguous()
    assert positions.shape[0] == num_tokens
    assert key.shape[0] == num_tokens
    assert key.shape[2] == head_dim
    assert key.dtype == query.dtype
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    assert rotary_dim <= head_dim
    out_of_range = _functions(num_tokens).rotary_embedding(
        torch.get_num_threads(),
        num_tokens,
        num_heads,
        key.shape[1],
        head_dim,
        rotary_dim,
        query.dtype == torch.float32,
        interleaved,
        positions.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        key.data_ptr(),
        key.stride(0),
        cos_sin_cache.data_ptr(),
        cos_sin_cache.shape[0],
    )
    if out_of_range:
        raise IndexError(f"a position lies outside of 0..{cos_sin_cache.shape[0] - 1}")
    return query, key


def store_kv(
    key: torch.Tensor,  # [T, num_kv_heads, D]
    value: torch.Tensor,  # [T, num_kv_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    key, value = _token_rows(key.to(key_cache.dtype)), _token_rows(value.to(value_cache.dtype))
    num_tokens, num_heads, head_dim = key.shape
    assert key_cache.shape[2:] == key.shape[1:]
    assert value_cache.shape[2:] == value.shape[1:]
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    assert slot_mapping.shape[0] == num_tokens
    size, value_size = key.element_size(), value.element_size()
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    out_of_range = _functions(num_tokens).store_kv(
        num_tokens,
        num_slots,
        num_heads * head_dim * size,
        value.shape[1] * value.shape[2] * value_size,
        key.data_ptr(),
        key.stride(0) * size,
        value.data_ptr(),
        value.stride(0) * value_size,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
    )
    if out_of_range:
        raise IndexError(f"a slot lies outside of 0..{num_slots - 1}")


def paged_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads, D]
    query = _token_rows(query)
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, cache_dim = key_cache.shape
    is_float = query.dtype == torch.float32
    assert key_cache.shape == value_cache.shape
    assert cache_dim == head_dim
    assert num_heads % num_kv_heads == 0
    assert key_cache.dtype == value_cache.dtype == query.dtype
    assert is_float or head_dim % 2 == 0
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    cu_seqlens_q, context_lens, block_tables = metadata.cu_seqlens_q, metadata.context_lens, metadata.block_tables
    assert cu_seqlens_q.dtype == context_lens.dtype == block_tables.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert context_lens.is_contiguous()
    assert block_tables.stride(1) == 1
    assert metadata.max_context_len <= block_tables.shape[1] * block_size
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype)
    failed = _library().released.paged_attention(
        torch.get_num_threads(),
        num_tokens,
        context_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        sliding_window or 0,
        is_float,
        scale,
        query.data_ptr(),
        query.stride(0),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        cu_seqlens_q.data_ptr(),
        context_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        out.data_ptr(),
    )
    _check_memory(failed)
    return out


def _library() -> Library:
    library = load_library()
    assert library is not None, "is_available() was not asked"
    return library


def _functions(num_rows: int) -> ctypes.CDLL:
    library = _library()
    return library.held if num_rows <= MAX_HELD_ROWS else library.released


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., W] as rows [T, W] of contiguous elements, copied only where there is no such view."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """[T, num_heads, D] with the heads of a token contiguous, as in a slice of qkv; else a copy."""
    num_heads, head_dim = x.shape[1], x.shape[2]
    return x if x.stride(2) == 1 and (x.stride(1) == head_dim or num_heads == 1) else x.contiguous()


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("a CPU kernel could not allocate its scratch memory")
