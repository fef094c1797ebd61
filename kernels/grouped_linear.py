"""Products of rows with one of several weights, in Triton: experts on the tokens that chose them.

Row r of group g gives x[r] @ weight[g]^T. The rows of a group lie together, the rows of group 0 first, and how many
each group has is known to the device alone, so that no launch waits for it. Groups without rows have no tile: the
launch is sized by the rows, and by the groups only up to their number.

Layouts: x [R, K] and weight [G, N, K], the last dimension dense, the weight FP8 with one scale a block or of x's
dtype; out [R, N].
"""

import torch
import triton
import triton.language as tl

from kernels.linear_tile import dot_rows
from kernels.packed_weight import BlockScaledWeight, Weight

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
    scale,  # [G, blocks of N, blocks of K] fp32, where HAS_SCALES
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
    scale_stride_g,
    scale_stride_n,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
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
    rows = tl.load(first_rows + group) + m
    columns = weight + group.to(tl.int64) * weight_stride_g + n.to(tl.int64) * weight_stride_n
    scales = scale + group.to(tl.int64) * scale_stride_g + n // SCALE_N * scale_stride_n
    total = dot_rows(
        x + rows * x_stride, columns, scales, m < size, n < num_columns, depth,
        BLOCK_M, BLOCK_N, BLOCK_K, SCALE_K, HAS_SCALES,
    )  # fmt: skip
    mask = (m < size)[:, None] & (n < num_columns)[None, :]
    tl.store(out + rows[:, None] * num_columns + n[None, :], total.to(out.dtype.element_ty), mask=mask)


def grouped_linear(
    x: torch.Tensor,  # [R, K], the rows of group 0 first
    group_sizes: torch.Tensor,  # [G] int64, summing to R or less
    weight: Weight,  # [G, N, K], of x's dtype; not packed
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [R, N]
    """Twin: `kernels.reference_linear.grouped_linear`."""
    num_rows, depth = x.shape
    num_groups, num_columns, _ = weight.shape
    data, scale, constants = weight_arguments(weight)
    assert weight.shape[2] == depth
    assert weight.dtype == x.dtype
    assert group_sizes.shape == (num_groups,)
    assert x.stride(1) == data.stride(2) == 1
    out = torch.empty((num_rows, num_columns), dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    first_rows = group_sizes.cumsum(0) - group_sizes
    has_rows = (group_sizes > 0).long()
    first_tiles = first_rows // BLOCK_M + has_rows.cumsum(0) - has_rows
    num_tiles = num_rows // BLOCK_M + min(num_groups, num_rows)
    _grouped_linear_kernel[(num_tiles, triton.cdiv(num_columns, BLOCK_N))](
        x,
        data,
        scale,
        out,
        first_rows,
        first_tiles,
        group_sizes,
        num_groups,
        num_columns,
        depth,
        x.stride(0),
        *data.stride()[:2],
        *scale.stride()[:2],
        **constants,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return out


def weight_arguments(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, dict[str, int | bool]]:
    """Entries, scales (the entries again where there are none) and the compile-time parameters that say so."""
    if isinstance(weight, BlockScaledWeight):
        rows, columns = weight.block_size
        assert columns % BLOCK_K == 0, "a tile's columns have one scale"
        assert weight.scale.is_contiguous()
        return weight.data, weight.scale, {"SCALE_N": rows, "SCALE_K": columns, "HAS_SCALES": True}
    assert isinstance(weight, torch.Tensor), "a packed weight reached a GPU"
    return weight, weight, {"SCALE_N": 1, "SCALE_K": BLOCK_K, "HAS_SCALES": False}
