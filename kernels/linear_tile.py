"""The product that linear kernels have in common, in Triton."""

import triton
import triton.language as tl


@triton.jit
def dot_rows(
    rows,  # [BLOCK_M] pointers to rows of x
    columns,  # [BLOCK_N] pointers to rows of the weight
    scales,  # [BLOCK_N] pointers to the weight's scales, where HAS_SCALES
    row_mask,
    column_mask,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_K: tl.constexpr,  # columns that share a scale, a multiple of BLOCK_K
    HAS_SCALES: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]. FP8 entries are exact in x's dtype; their scale is applied to the sums of a block."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        left = tl.load(rows[:, None] + start + k[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        right = tl.load(columns[:, None] + start + k[None, :], mask=column_mask[:, None] & inside[None, :], other=0.0)
        if HAS_SCALES:
            factors = tl.load(scales + start // SCALE_K, mask=column_mask, other=0.0)
            sums = tl.dot(left, tl.trans(right.to(left.dtype)), input_precision="ieee")
            total += sums * factors[None, :]
        else:
            total += tl.dot(left, tl.trans(right), input_precision="ieee")
    return total
