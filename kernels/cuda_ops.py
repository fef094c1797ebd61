"""The operators of `kernels.ops` on a CUDA device: Triton kernels, and matrix products by torch."""

import torch
import torch.nn.functional as F

from kernels import flash_attention
from kernels import paged_attention as triton_attention
from kernels.grouped_linear import grouped_linear
from kernels.latent_attention import latent_attention
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import BlockScaledWeight, Weight
from kernels.reference import batched_linear, embedding, pack_weight
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_embedding import rotary_embedding
from kernels.scaled_linear import scaled_linear
from kernels.silu_and_mul import silu_and_mul
from kernels.store_kv import store_kv
from kernels.store_latent import store_latent

__all__ = [
    "add_rms_norm",
    "batched_linear",
    "embedding",
    "grouped_linear",
    "latent_attention",
    "linear",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv",
    "store_latent",
]


def paged_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads, D]
    """By vllm-flash-attn where it is installed and fits, else by Triton."""
    function = flash_attention.find_flash_attention()
    capability = torch.cuda.get_device_capability(query.device)
    if function and flash_attention.fits(query.dtype, query.shape[2], key_cache.shape[1], capability):
        return flash_attention.flash_attention(function, query, key_cache, value_cache, metadata, scale, sliding_window)
    return triton_attention.paged_attention(query, key_cache, value_cache, metadata, scale, sliding_window)


def linear(
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [N, K]; plain, for torch, or FP8 with scales
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [..., N]
    """x @ weight^T + bias; a wider `out_dtype` receives the product's fp32 sums unrounded."""
    if isinstance(weight, BlockScaledWeight):
        return scaled_linear(x, weight, bias, out_dtype)
    assert isinstance(weight, torch.Tensor), "a packed weight reached torch"
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    assert out_dtype == torch.float32
    product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=out_dtype).unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias
