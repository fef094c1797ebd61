"""Torch twins: what every kernel computes, in operators that run anywhere.

They define the results that the kernels are tested against, and serve where no kernel does.
Sums and exponentials are taken in fp32, results returned in the dtype of the input.
"""

import torch
import torch.nn.functional as F

from kernels.packed_weight import Weight
from kernels.reference_attention import paged_attention
from kernels.reference_latent import latent_attention, store_latent
from kernels.reference_linear import batched_linear, grouped_linear, linear, pack_weight, plain_weight

__all__ = [
    "add_rms_norm",
    "batched_linear",
    "embedding",
    "grouped_linear",
    "latent_attention",
    "linear",
    "pack_weight",
    "paged_attention",
    "plain_weight",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv",
    "store_latent",
]


def rms_norm(
    x: torch.Tensor,  # [..., H]
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019, equation 4)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,  # [..., H]
    residual: torch.Tensor,  # [..., H]
    weight: torch.Tensor,  # [H]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x), residual + x); the sum is rounded to x.dtype before the norm reads it."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]: gate, then up
) -> torch.Tensor:  # [T, I]
    """silu(gate) * up (Shazeer, 2020: GLU variants, SwiGLU)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotary_embedding(
    positions: torch.Tensor,  # [T] int64
    query: torch.Tensor,  # [T, num_heads, D]
    key: torch.Tensor,  # [T, num_kv_heads, D]
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] fp32: cosines, then sines
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first rotary_dim entries of every head by its position (Su et al., 2021, section 3.4.2).

    A pair is (i, i + rotary_dim / 2), or (2i, 2i + 1) where `interleaved`.
    """
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


def store_kv(
    key: torch.Tensor,  # [T, num_kv_heads, D]
    value: torch.Tensor,  # [T, num_kv_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    """Writes every row's key and value to its slot."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    key_cache.flatten(0, 1)[slots] = key[stored].to(key_cache.dtype)
    value_cache.flatten(0, 1)[slots] = value[stored].to(value_cache.dtype)


def embedding(
    token_ids: torch.Tensor,  # [T] int64
    weight: Weight,  # [N, K]; plain, for torch
) -> torch.Tensor:  # [T, K]
    """Rows of the weight."""
    assert isinstance(weight, torch.Tensor), "a packed weight reached torch"
    return F.embedding(token_ids, weight)
