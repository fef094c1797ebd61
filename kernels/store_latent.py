"""Storing new latents in the paged cache, in Triton.

Row t goes to slot_mapping[t] = block * block_size + offset; -1 stores nothing.

Layouts: latent [T, D], any row stride; cache [num_blocks, block_size, D], any strides but of the last dimension.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_latent_kernel(
    latent,
    latent_cache,
    slot_mapping,
    latent_stride_t,
    cache_stride_b,
    cache_stride_s,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    entries = tl.arange(0, BLOCK)
    mask = entries < WIDTH
    values = tl.load(latent + row * latent_stride_t + entries, mask=mask)
    place = latent_cache + slot // BLOCK_SIZE * cache_stride_b + slot % BLOCK_SIZE * cache_stride_s
    tl.store(place + entries, values, mask=mask)


def store_latent(
    latent: torch.Tensor,  # [T, D]
    latent_cache: torch.Tensor,  # [num_blocks, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64; -1 = not stored
) -> None:
    """Twin: `kernels.reference_latent.store_latent`."""
    num_tokens, width = latent.shape
    assert latent_cache.shape[2] == width
    assert latent.dtype == latent_cache.dtype
    assert latent.stride(1) == latent_cache.stride(2) == 1
    assert slot_mapping.shape == (num_tokens,)
    if num_tokens == 0:
        return
    _store_latent_kernel[(num_tokens,)](
        latent,
        latent_cache,
        slot_mapping,
        latent.stride(0),
        *latent_cache.stride()[:2],
        WIDTH=width,
        BLOCK_SIZE=latent_cache.shape[1],
        BLOCK=triton.next_power_of_2(width),
    )
