"""Torch twins of products with a weight, and with several weights of one shape."""

import torch
import torch.nn.functional as F

from kernels.packed_weight import Weight

# Rows of a half-precision weight that are widened at a time: few enough to stay in a CPU's cache.
WIDENED_ROWS = 4096


def pack_weight(
    weight: torch.Tensor,  # [N, K] or [G, N, K]
) -> Weight:
    """The weight itself: torch reads the layout of the checkpoint."""
    return weight


def linear(
    x: torch.Tensor,  # [T, K]
    weight: Weight,  # [N, K]; plain, for torch
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [T, N]
    """x @ weight^T + bias, not rounded below `out_dtype` (default: x.dtype) on the way."""
    assert isinstance(weight, torch.Tensor), "a packed weight reached torch"
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    wide = x.to(out_dtype)
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)
    for start in range(0, weight.shape[0], WIDENED_ROWS):
        rows = slice(start, start + WIDENED_ROWS)
        out[..., rows] = F.linear(wide, weight[rows].to(out_dtype), None if bias is None else bias[rows].to(out_dtype))
    return out


def grouped_linear(
    x: torch.Tensor,  # [R, K], the rows of group 0 first
    group_sizes: torch.Tensor,  # [G] int64, summing to R
    weight: Weight,  # [G, N, K]; plain, for torch
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [R, N]
    """Every group's rows times its own weight, transposed; a group without rows is not touched."""
    assert isinstance(weight, torch.Tensor), "a packed weight reached torch"
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=out_dtype or x.dtype, device=x.device)
    start = 0
    for group, size in enumerate(group_sizes.tolist()):
        if size:
            rows = slice(start, start + size)
            out[rows] = linear(x[rows], weight[group], None, out_dtype)
            start += size
    assert start == x.shape[0]
    return out


def batched_linear(
    x: torch.Tensor,  # [T, G, K]
    weight: Weight,  # [G, N, K]; plain, for torch
) -> torch.Tensor:  # [T, G, N]
    """Every group's part of a token times the group's weight, transposed."""
    assert isinstance(weight, torch.Tensor), "a packed weight reached torch"
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
