"""Launchers of the CPU kernels that write and read the paged cache."""

import torch

from kernels.cpu.calls import check_memory, functions, loaded_library, token_rows
from kernels.cpu.threads import num_threads
from kernels.metadata import AttentionMetadata


def store_kv(
    key: torch.Tensor,  # [T, num_kv_heads, D]
    value: torch.Tensor,  # [T, num_kv_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    key, value = token_rows(key.to(key_cache.dtype)), token_rows(value.to(value_cache.dtype))
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
    out_of_range = functions(num_tokens).store_kv(
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
    query = token_rows(query)
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
    failed = loaded_library().released.paged_attention(
        num_threads(),
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
    check_memory(failed)
    return out


def store_latent(
    latent: torch.Tensor,  # [T, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    latent = latent.to(latent_cache.dtype).contiguous()
    num_tokens, width = latent.shape
    assert latent_cache.shape[2] == width
    assert latent_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    assert slot_mapping.shape[0] == num_tokens
    num_slots = latent_cache.shape[0] * latent_cache.shape[1]
    row_bytes = width * latent.element_size()
    out_of_range = functions(num_tokens).store_kv(
        num_tokens,
        num_slots,
        row_bytes,
        0,  # no values beside the latents
        latent.data_ptr(),
        row_bytes,
        latent.data_ptr(),
        0,
        latent_cache.data_ptr(),
        latent_cache.data_ptr(),
        slot_mapping.data_ptr(),
    )
    if out_of_range:
        raise IndexError(f"a slot lies outside of 0..{num_slots - 1}")


def latent_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    metadata: AttentionMetadata,
    scale: float,
    value_dim: int,
) -> torch.Tensor:  # [T, num_heads, value_dim], a view
    """The last entries of a key are summed as well and left out, an eighth of the work at DeepSeek's sizes."""
    cache = latent_cache.unsqueeze(2)
    return paged_attention(query, cache, cache, metadata, scale)[..., :value_dim]
