"""Products with an FP8 weight that has one scale a block, in Triton: x @ (data * scale)^T.

Memory is read at FP8's width, products are taken in x's dtype, sums in fp32; activations are not quantised.

Layouts: x [M, K] and data [N, K], the last dimension dense; scale [blocks of N, blocks of K]; out [M, N].
"""

import torch
import triton
import triton.language as tl

from kernels.grouped_linear import BLOCK_K, weight_arguments
from kernels.linear_tile import dot_rows
from kernels.packed_weight import BlockScaledWeight

NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _scaled_linear_kernel(
    x,
    data,
    scale,
    out,
    num_rows,
    num_columns,
    depth,
    x_stride,
    data_stride,
    scale_stride,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of rows, blocks of columns)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = dot_rows(
        x + m * x_stride, data + n.to(tl.int64) * data_stride, scale + n // SCALE_N * scale_stride,
        m < num_rows, n < num_columns, depth,
        BLOCK_M, BLOCK_N, BLOCK_K, SCALE_K, HAS_SCALES,
    )  # fmt: skip
    mask = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    tl.store(out + m[:, None] * num_columns + n[None, :], total.to(out.dtype.element_ty), mask=mask)


def scaled_linear(
    x: torch.Tensor,  # [..., K]
    weight: BlockScaledWeight,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [..., N]
    """Twin: `kernels.reference_linear.linear`."""
    num_columns, depth = weight.shape
    data, scale, constants = weight_arguments(weight)
    assert x.shape[-1] == depth
    assert weight.dtype == x.dtype
    rows = x.reshape(-1, depth)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    assert data.stride(1) == 1
    num_rows = rows.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=out_dtype or x.dtype, device=x.device)
    # Decodes are a stream of weights: many small tiles keep more of the device's memory busy.
    block_m, block_n = (16, 32) if num_rows <= 16 else (64, 64)
    if num_rows:
        _scaled_linear_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, block_n))](
            rows,
            data,
            scale,
            out,
            num_rows,
            num_columns,
            depth,
            rows.stride(0),
            data.stride(0),
            scale.stride(0),
            **constants,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS,
        )
    out = out if bias is None else out + bias
    return out.unflatten(0, x.shape[:-1]) if x.dim() != 2 else out
