"""Launchers of the compiled CPU kernels: shapes and types are checked here, then only addresses are passed.

bf16 and fp32. Every kernel is row-invariant: the result of a row is the same bit for bit whatever
other rows a call has (the heads of the C files say how).
"""

import torch

from kernels import reference
from kernels.cpu.attention import latent_attention, paged_attention, store_kv, store_latent
from kernels.cpu.calls import as_rows, check_memory, functions, loaded_library, token_rows
from kernels.cpu.fused import join_norms, linear_silu_and_mul, qkv_attention
from kernels.cpu.grouped_linear import batched_linear, grouped_linear
from kernels.cpu.library import load_library
from kernels.cpu.threads import num_threads
from kernels.packed_weight import PackedWeight, Weight

__all__ = [
    "add_rms_norm",
    "batched_linear",
    "embedding",
    "grouped_linear",
    "is_available",
    "join_norms",
    "latent_attention",
    "linear",
    "linear_silu_and_mul",
    "pack_weight",
    "paged_attention",
    "qkv_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv",
    "store_latent",
    "unpack_weight",
]

BLOCK_COLUMNS = 32  # NB in dot_tile.h


def is_available() -> bool:
    return load_library() is not None


def pack_weight(
    weight: torch.Tensor,  # [N, K] or [G, N, K]
) -> PackedWeight:
    """Blocks of 32 outputs side by side: fp32 [N/32, K, 32], bf16 [N/32, K/2, 32, 2], padded with zeros."""
    num_rows, num_columns = weight.shape[-2:]
    num_groups = weight.shape[0] if weight.dim() == 3 else None
    depth = 2 if weight.dtype == torch.bfloat16 else 1
    blocks, steps = -(-num_rows // BLOCK_COLUMNS), -(-num_columns // depth)
    data = torch.empty((num_groups or 1, blocks, steps, BLOCK_COLUMNS, depth), dtype=weight.dtype)
    padded = torch.zeros((blocks * BLOCK_COLUMNS, steps * depth), dtype=weight.dtype)
    for group, matrix in zip(data, weight.view(-1, num_rows, num_columns), strict=True):
        padded[:num_rows, :num_columns] = matrix
        group.copy_(padded.view(blocks, BLOCK_COLUMNS, steps, depth).transpose(1, 2))
    return PackedWeight(data if num_groups else data[0], num_rows, num_columns, num_groups)


def unpack_weight(weight: PackedWeight) -> torch.Tensor:
    """What `pack_weight` was given, as a copy."""
    blocks, steps, width, depth = weight.data.shape[-4:]
    plain = weight.data.transpose(-3, -2).reshape(-1, blocks * width, steps * depth)
    return plain[:, : weight.num_rows, : weight.num_columns].reshape(weight.shape)


def linear(
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [N, K], of x's dtype
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [..., N]
    if not isinstance(weight, PackedWeight):
        return reference.linear(x, weight, bias, out_dtype)
    rows = as_rows(x)
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
    library = loaded_library().released
    failed = (library.linear_float if is_float else library.linear_bf16)(
        num_threads(),
        num_rows,
        weight.num_rows,
        num_columns,
        rows.data_ptr(),
        rows.stride(0),
        data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.dtype == torch.float32,
        False,
    )
    check_memory(failed)
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
    out_of_range = functions(num_tokens).embedding(
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
    rows = as_rows(x)
    num_rows, width = rows.shape
    assert weight.shape == (width,)
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    functions(num_rows).rms_norm(
        num_threads(),
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
    rows = as_rows(gate_up)
    num_rows, width = rows.shape
    assert width % 2 == 0
    out = torch.empty((*gate_up.shape[:-1], width // 2), dtype=gate_up.dtype)
    functions(num_rows).silu_and_mul(
        num_threads(),
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
    query, key = token_rows(query), token_rows(key)
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
    out_of_range = functions(num_tokens).rotary_embedding(
        num_threads(),
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
