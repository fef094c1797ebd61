"""Rotary position embedding, plain and scaled."""

import math

import torch
from torch import nn

from kernels import ops
from models.model_config import LinearRopeScaling, Llama3RopeScaling, RopeConfig, YarnRopeScaling


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their position (Su et al., 2021)."""

    cos_sin_cache: torch.Tensor  # [max_positions, head_dim] fp32: cosines, then sines

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig, device: torch.device) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(head_dim, rope).to(device))
        factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnRopeScaling) else 1.0
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        self.register_buffer("cos_sin_cache", cos_sin, persistent=False)

    def forward(
        self,
        positions: torch.Tensor,  # [num_tokens] int64
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.rotary_embedding(positions, query, key, self.cos_sin_cache, self.interleaved)


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
        case YarnRopeScaling():
            return _yarn_frequencies(frequencies, rope.theta, rope.scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Slow pairs are stretched by the factor, fast ones kept, those between blended (Llama 3.1's reference code)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn_frequencies(frequencies: torch.Tensor, theta: float, scaling: YarnRopeScaling) -> torch.Tensor:
    """Between the pairs that turn `beta_fast` and `beta_slow` times within the original context lies a linear ramp."""
    num_pairs = len(frequencies)

    def pair_that_turns(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return num_pairs * math.log(wavelength) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    high += 0.001 if high == low else 0  # no division by zero
    ramp = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
