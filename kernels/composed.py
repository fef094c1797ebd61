"""Operators that a backend may have as one call, made of its separate ones."""

from types import ModuleType

import torch

from kernels.metadata import AttentionMetadata
from kernels.packed_weight import Weight


def linear_silu_and_mul(
    backend: ModuleType,
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [2 * I, K]: gate, then up
) -> torch.Tensor:  # [..., I]
    return backend.silu_and_mul(backend.linear(x, weight))


def join_norms(
    backend: ModuleType,
    x: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    second: torch.Tensor,  # [T, H]
    second_weight: torch.Tensor,  # [H]
    eps: float,
    positions: torch.Tensor,  # [T] int64
    second_leads: bool,
) -> torch.Tensor:  # [T, 2 * H]
    # On the device and by position, so that a captured graph and padding rows do the same.
    x = x.masked_fill(positions.unsqueeze(1) == 0, 0)
    normed = backend.rms_norm(x, weight, eps), backend.rms_norm(second, second_weight, eps)
    return torch.cat(normed[::-1] if second_leads else normed, dim=-1)


def qkv_attention(
    backend: ModuleType,
    positions: torch.Tensor,  # [T] int64
    qkv: torch.Tensor,  # [T, (num_heads + 2 * num_kv_heads) * D]
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] fp32: cosines, then sines
    interleaved: bool,
    query_norm: torch.Tensor | None,  # [D]
    key_norm: torch.Tensor | None,  # [D]
    eps: float,
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:  # [T, num_heads * D]
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if query_norm is not None:
        query = backend.rms_norm(query, query_norm, eps)
    if key_norm is not None:
        key = backend.rms_norm(key, key_norm, eps)
    query, key = backend.rotary_embedding(positions, query, key, cos_sin_cache, interleaved)
    backend.store_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
    return backend.paged_attention(query, key_cache, value_cache, metadata, scale, sliding_window).flatten(1)
