"""The operators that the rest of the program calls, each served by the best kernels for its device.

CUDA: Triton (attention by vllm-flash-attn where it is installed). CPU: the compiled kernels of
`kernels.cpu` in bf16 and fp32 where a compiler is found. Else the torch twins, which also say what
each operator computes.
"""

import functools
import importlib
import logging
from types import ModuleType

import torch

from kernels import composed, reference
from kernels.cpu import ops as cpu_ops
from kernels.cpu import threads
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import PackedWeight, Weight

logger = logging.getLogger(__name__)

CPU_KERNEL_DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def select_backend(device_type: str, dtype: torch.dtype) -> ModuleType:
    """The module whose functions serve tensors of a device and dtype; logged once for each pair."""
    backend: ModuleType = reference
    if device_type == "cuda":
        # Not at the top: Triton is absent where there is no CUDA.
        backend = importlib.import_module("kernels.cuda_ops")
    elif device_type == "cpu" and dtype in CPU_KERNEL_DTYPES and cpu_ops.is_available():
        backend = cpu_ops
    logger.info("kernels for %s on %s: %s", dtype, device_type, backend.__name__)
    return backend


def set_num_threads(num: int | None, dtype: torch.dtype) -> None:
    """CPU threads of the operators on this dtype from now on; None: as many as so far.

    Where compiled kernels serve them, torch's own operators keep one thread; else these have all.
    """
    num = num or threads.num_threads()
    if select_backend("cpu", dtype) is cpu_ops:
        threads.set_num_threads(num)
    else:
        torch.set_num_threads(num)


def is_row_invariant(x: torch.Tensor) -> bool:
    """Whether a row's results are the same bit for bit whatever rows are computed with it, as the CPU kernels' are."""
    return _backend(x) is cpu_ops


def reads_block_scaled(device: torch.device, block_size: tuple[int, int]) -> bool:
    """Whether `linear` and `grouped_linear` take a `BlockScaledWeight` on a device, and gain by it.

    FP8 is read by GPUs of compute capability 8.9 and above; the kernels' tiles must lie within a block's columns.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9) and block_size[1] % 64 == 0


def rms_norm(
    x: torch.Tensor,  # [..., H]
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    return _backend(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,  # [..., H]
    residual: torch.Tensor,  # [..., H]; may be overwritten
    weight: torch.Tensor,  # [H]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual)."""
    return _backend(x).add_rms_norm(x, residual, weight, eps)


def join_norms(
    x: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    second: torch.Tensor,  # [T, H]
    second_weight: torch.Tensor,  # [H]
    eps: float,
    positions: torch.Tensor,  # [T] int64
    second_leads: bool,
) -> torch.Tensor:  # [T, 2 * H]
    """rms_norm(x) beside rms_norm(second), or behind it where `second_leads`; x counts as zeros at position 0."""
    backend = _backend(x)
    arguments = (x, weight, second, second_weight, eps, positions, second_leads)
    return cpu_ops.join_norms(*arguments) if backend is cpu_ops else composed.join_norms(backend, *arguments)


def silu_and_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
) -> torch.Tensor:  # [T, I]
    return _backend(gate_up).silu_and_mul(gate_up)


def rotary_embedding(
    positions: torch.Tensor,  # [T] int64
    query: torch.Tensor,  # [T, num_heads, D]; may be overwritten
    key: torch.Tensor,  # [T, num_kv_heads, D]; may be overwritten
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] fp32: cosines, then sines
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backend(query).rotary_embedding(positions, query, key, cos_sin_cache, interleaved)


def store_kv(
    key: torch.Tensor,  # [T, num_kv_heads, D]
    value: torch.Tensor,  # [T, num_kv_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    _backend(key).store_kv(key, value, key_cache, value_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads, D]
    return _backend(query).paged_attention(query, key_cache, value_cache, metadata, scale, sliding_window)


def qkv_attention(
    positions: torch.Tensor,  # [T] int64
    qkv: torch.Tensor,  # [T, (num_heads + 2 * num_kv_heads) * D]; queries and keys may be overwritten
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
    backend = _backend(qkv)
    arguments = (positions, qkv, cos_sin_cache, interleaved, query_norm, key_norm, eps, key_cache, value_cache)
    if backend is cpu_ops:
        return cpu_ops.qkv_attention(*arguments, metadata, scale, sliding_window)
    return composed.qkv_attention(backend, *arguments, metadata, scale, sliding_window)


def store_latent(
    latent: torch.Tensor,  # [T, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    _backend(latent).store_latent(latent, latent_cache, slot_mapping)


def latent_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    metadata: AttentionMetadata,
    scale: float,
    value_dim: int,
) -> torch.Tensor:  # [T, num_heads, value_dim]
    """Attention of all heads to one latent a token, whose first `value_dim` entries are also its value."""
    return _backend(query).latent_attention(query, latent_cache, metadata, scale, value_dim)


def pack_weight(
    weight: torch.Tensor,  # [N, K], or [G, N, K] for `grouped_linear` and `batched_linear`
) -> Weight:
    """The weight in the layout that `linear` reads fastest; the caller drops its own reference."""
    return _backend(weight).pack_weight(weight)


def linear(
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [N, K], of x's dtype
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [..., N]
    return _backend(x).linear(x, weight, bias, out_dtype)


def linear_silu_and_mul(
    x: torch.Tensor,  # [..., K]
    weight: Weight,  # [2 * I, K], of x's dtype: gate, then up
) -> torch.Tensor:  # [..., I]
    """silu(x gate^T) * (x up^T)."""
    backend = _backend(x)
    return (
        cpu_ops.linear_silu_and_mul(x, weight)
        if backend is cpu_ops
        else composed.linear_silu_and_mul(backend, x, weight)
    )


def grouped_linear(
    x: torch.Tensor,  # [R, K], the rows of group 0 first
    group_sizes: torch.Tensor,  # [G] int64, summing to R or less
    weight: Weight,  # [G, N, K], of x's dtype
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [R, N]
    """Every group's rows times its own weight; groups without rows cost nothing. Rows of no group stay undefined."""
    return _backend(x).grouped_linear(x, group_sizes, weight, out_dtype)


def batched_linear(
    x: torch.Tensor,  # [T, G, K]
    weight: Weight,  # [G, N, K], of x's dtype
) -> torch.Tensor:  # [T, G, N]
    """Every group's part of a token times the group's weight."""
    return _backend(x).batched_linear(x, weight)


def unpack_weight(
    weight: Weight,  # [N, K] or [G, N, K]
) -> torch.Tensor:
    """The plain tensor; a copy where the weight is not one."""
    return cpu_ops.unpack_weight(weight) if isinstance(weight, PackedWeight) else reference.plain_weight(weight)


def embedding(
    token_ids: torch.Tensor,  # [T] int64
    weight: Weight,  # [N, K]
) -> torch.Tensor:  # [T, K]
    return _backend(weight).embedding(token_ids, weight)


def _backend(tensor: Weight) -> ModuleType:
    return select_backend(tensor.device.type, tensor.dtype)
