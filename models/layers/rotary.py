"""Rotary position embedding, plain and scaled."""

import math

import torch
from torch import nn

from kernels import ops
from models.model_config import LinearRopeScaling, Llama3RopeScaling, RopeConfig


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their position (Su et al., 2021); pairs are (i, i + head_dim / 2)."""

    cos_sin_cache: torch.Tensor  # [max_positions, head_dim] fp32: cosines, then sines

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(head_dim, rope).to(device))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)

    def forward(
        self,
        positions: torch.Tensor,  # [num_tokens] int64
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.rotary_embedding(positions, query, key, self.cos_sin_cache, interleaved=False)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Radians a position, of each pair; fp32 [head_dim / 2]."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling():
            return _llama3_frequencies(frequencies, rope.scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Slow pairs are stretched by the factor, fast ones kept, those between blended (Llama 3.1's reference code)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
