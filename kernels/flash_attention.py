"""vllm-flash-attn's paged attention, where it is installed.

Two builds exist and their signatures differ: the wheel `vllm_flash_attn` (2.6, bound to torch 2.4) takes
the keys' lengths as `cu_seqlens_k`, the copy that vLLM maintains (`vllm.vllm_flash_attn`) as `seqused_k`.
Both want half precision, heads of a multiple of 8 up to 256, blocks of a multiple of 16 and compute
capability 8 or newer. How they split the keys depends on the whole batch, so in half precision a row's
last bits may change with its batch mates; `kernels.paged_attention` has no such dependence.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable

import torch

from kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

PACKAGES = ("vllm_flash_attn", "vllm.vllm_flash_attn")
MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256


@functools.cache
def find_flash_attention() -> Callable[..., torch.Tensor] | None:
    """The package's `flash_attn_varlen_func`, or None where none is installed or loads; said once in the log."""
    for package in PACKAGES:
        if not _is_installed(package):
            continue
        try:
            function = importlib.import_module(package).flash_attn_varlen_func
        except ImportError as error:  # its compiled part belongs to another torch
            logger.warning("%s is installed but does not load, so Triton serves attention: %s", package, error)
            continue
        logger.info("attention by %s", package)
        return function
    return None


def _is_installed(package: str) -> bool:
    parents = package.split(".")[:-1]
    return all(importlib.util.find_spec(name) for name in (*parents, package))


def fits(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    capability: tuple[int, int],
) -> bool:
    """Whether the package can serve these shapes on a device of this compute capability."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and block_size % 16 == 0
        and capability >= MIN_CAPABILITY
    )


def flash_attention(
    function: Callable[..., torch.Tensor],  # from find_flash_attention
    query: torch.Tensor,  # [T, num_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads, D]
    """Twin: `kernels.reference_attention.paged_attention`, for a batch without rows past its last sequence."""
    if "seqused_k" in inspect.signature(function).parameters:
        lengths = {"seqused_k": metadata.context_lens}
    else:
        ends = metadata.context_lens.cumsum(0, dtype=torch.int32)
        lengths = {"cu_seqlens_k": torch.cat((ends.new_zeros(1), ends))}
    return function(
        q=query,
        k=key_cache,
        v=value_cache,
        cu_seqlens_q=metadata.cu_seqlens_q,
        max_seqlen_q=metadata.max_seqlen_q,
        max_seqlen_k=metadata.max_context_len,
        softmax_scale=scale,
        causal=True,
        # The window counts the row's own position, the package only those before it.
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        block_table=metadata.block_tables,
        **lengths,
    )
