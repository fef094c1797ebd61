"""Products of rows with one of several weights, in Triton: experts on the tokens that chose them.

Row r of group g gives x[r] @ weight[g]^T. The rows of a group lie together, the rows of group 0 first, and how many
each group has is known to the device alone, so that no launch waits for it. Groups without rows have no tile: the
launch is sized by the rows, and by the groups only up to their number.

Layouts: x [R, K] and weight [G, N, K], the last dimension dense; out [R, N].
"""

import torch
import triton
import triton.language as tl

from kernels.packed_weight import Weight

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
NUM_WARPS = 4


@triton.jit
def _find_tile_group(first_tiles, num_groups, index):
    """The last group whose first tile is not beyond: of groups that begin at one tile, all but the last are empty."""
    low = 0
    high = num_groups
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(first_tiles + middle) <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _grouped_linear_kernel(
    x,
    weight,
    out,
    first_rows,  # [G] of each group
    first_tiles,  # [G] of each group
    group_sizes,  # [G]
    num_groups,
    num_columns,
    depth,
    x_stride,
    weight_stride_g,
    weight_stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tiles of rows, blocks of columns)."""
    tile = tl.program_id(0)
    group = _find_tile_group(first_tiles, num_groups, tile)
    first = (tile - tl.load(first_tiles + group)) * BLOCK_M
    size = tl.load(group_sizes + group)
    if first >= size:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = tl.load(first_rows + group) + m
    x_rows = x + rows[:, None] * x_stride
    columns = weight + group.to(tl.int64) * weight_stride_g + n.to(tl.int64)[:, None] * weight_stride_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        left = tl.load(x_rows + start + k[None, :], mask=(m < size)[:, None] & inside[None, :], other=0.0)
        right = tl.load(columns + start + k[None, :], mask=(n < num_columns)[:, None] & inside[None, :], other=0.0)
        total += tl.dot(left, tl.trans(right), input_precision="ieee")
    mask = (m < size)[:, None] & (n < num_columns)[None, :]
    tl.store(out + rows[:, None] * num_columns + n[None, :], total.to(out.dtype.element_ty), mask=mask)


def grouped_linear(
    x: torch.Tensor,  # [R, K], the rows of group 0 first
    group_sizes: torch.Tensor,  # [G] int64, summing to R
    weight: Weight,  # [G, N, K], of x's dtype; plain
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [R, N]
    """Twin: `kernels.reference_linear.grouped_linear`."""
    assert isinstance(weight, torch.Tensor), "a packed weight reached a GPU"
    num_rows, depth = x.shape
    num_groups, num_columns, _ = weight.shape
    assert weight.shape[2] == depth
    assert weight.dtype == x.dtype
    assert group_sizes.shape == (num_groups,)
    assert x.stride(1) == weight.stride(2) == 1
    out = torch.empty((num_rows, num_columns), dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    first_rows = group_sizes.cumsum(0) - group_sizes
    has_rows = (group_sizes > 0).long()
    first_tiles = first_rows // BLOCK_M + has_rows.cumsum(0) - has_rows
    num_tiles = num_rows // BLOCK_M + min(num_groups, num_rows)
    _grouped_linear_kernel[(num_tiles, triton.cdiv(num_columns, BLOCK_N))](
        x,
        weight,
        out,
        first_rows,
        first_tiles,
        group_sizes,
        num_groups,
        num_columns,
        depth,
        x.stride(0),
        *weight.stride()[:2],
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return out
