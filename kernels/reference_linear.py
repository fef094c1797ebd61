"""Torch twins of products with a weight, and with several weights of one shape."""

import torch
import torch.nn.functional as F

from kernels.packed_weight import PackedWeight, Weight

# Rows of a half-precision weight that are widened at a time: few enough to stay in a CPU's cache.
WIDENED_ROWS = 4096


def pack_weight(
    weight: torch.Tensor,  # [N, K] or [G, N, K]
) -> Weight:
    """The weight itself: torch reads the layout of the checkpoint."""
    return weight


def linear(
    x: torch.Tensor,  # [T, K]
    weight: Weight,  # [N, K]; not packed
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [T, N]
    """x @ weight^T + bias, not rounded below `out_dtype` (default: x.dtype) on the way."""
    weight = plain_weight(weight)
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    wide = x.to(out_dtype)
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)
    for start in range(0, weight.shape[0], WIDENED_ROWS):
        rows = slice(start, start + WIDENED_ROWS)
        out[..., rows] = F.linear(wide, weight[rows].to(out_dtype), None if bias is None else bias[rows].to(out_dtype))
    return out


def plain_weight(weight: Weight) -> torch.Tensor:
    """The weight as torch reads it; an FP8 one times its scales, rounded to the dtype of activations."""
    assert not isinstance(weight, PackedWeight), "a packed weight reached torch"
    if isinstance(weight, torch.Tensor):
        return weight
    num_rows, num_columns = weight.shape[-2:]
    scale = weight.scale.repeat_interleave(weight.block_size[0], -2)[..., :num_rows, :]
    scale = scale.repeat_interleave(weight.block_size[1], -1)[..., :num_columns]
    return (weight.data.float() * scale).to(weight.dtype)


def grouped_linear(
    x: torch.Tensor,  # [R, K], the rows of group 0 first
    group_sizes: torch.Tensor,  # [G] int64, summing to R or less
    weight: Weight,  # [G, N, K]; not packed
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [R, N]
    """Every group's rows times its own weight, transposed; a group without rows is not touched."""
    weight = plain_weight(weight)
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=out_dtype or x.dtype, device=x.device)
    start = 0
    for group, size in enumerate(group_sizes.tolist()):
        if size:
            rows = slice(start, start + size)
            out[rows] = linear(x[rows], weight[group], None, out_dtype)
            start += size
    assert start <= x.shape[0]
    return out


def batched_linear(
    x: torch.Tensor,  # [T, G, K]
    weight: Weight,  # [G, N, K]; not packed
) -> torch.Tensor:  # [T, G, N]
    """Every group's part of a token times the group's weight, transposed."""
    weight = plain_weight(weight)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
