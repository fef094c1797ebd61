"""Torch twins of attention over a cache of latents: one vector a token, shared by all heads (DeepSeek-V2, 2024)."""

import torch

from kernels.metadata import AttentionMetadata
from kernels.reference_attention import paged_attention


def store_latent(
    latent: torch.Tensor,  # [T, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    """Writes every row's latent to its slot."""
    stored = slot_mapping >= 0
    latent_cache.flatten(0, 1)[slot_mapping[stored]] = latent[stored].to(latent_cache.dtype)


def latent_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    metadata: AttentionMetadata,
    scale: float,
    value_dim: int,
) -> torch.Tensor:  # [T, num_heads, value_dim]
    """Paged attention with one KV head, whose values are the first `value_dim` entries of its keys."""
    cache = latent_cache.unsqueeze(2)
    return paged_attention(query, cache, cache[..., :value_dim], metadata, scale)
