"""Launchers of the CPU kernel for several weights of one shape; rows are bit for bit those of a call on them alone."""

import numpy as np
import torch

from kernels import reference_linear
from kernels.cpu.calls import check_memory, loaded_library
from kernels.cpu.threads import num_threads
from kernels.packed_weight import PackedWeight, Weight


def grouped_linear(
    x: torch.Tensor,  # [R, K], the rows of group 0 first
    group_sizes: torch.Tensor,  # [G] int64, summing to R or less
    weight: Weight,  # [G, N, K], of x's dtype
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [R, N]
    if not isinstance(weight, PackedWeight):
        return reference_linear.grouped_linear(x, group_sizes, weight, out_dtype)
    sizes = group_sizes.numpy()
    assert sizes.shape == (weight.num_groups,)
    busy = np.flatnonzero(sizes)
    groups = np.empty((len(busy), 3), dtype=np.int64)
    groups[:, 0], groups[:, 2] = busy, sizes[busy]
    groups[:, 1] = np.cumsum(groups[:, 2]) - groups[:, 2]
    assert x.shape[0] >= sizes.sum()
    x = x if x.stride(1) == 1 else x.contiguous()
    return _run(x, groups, 1, weight, out_dtype)


def batched_linear(
    x: torch.Tensor,  # [T, G, K]
    weight: Weight,  # [G, N, K], of x's dtype
) -> torch.Tensor:  # [T, G, N]
    if not isinstance(weight, PackedWeight):
        return reference_linear.batched_linear(x, weight)
    num_tokens, num_groups, num_columns = x.shape
    assert num_groups == weight.num_groups
    if x.stride(2) != 1 or x.stride(0) != num_groups * x.stride(1):
        x = x.contiguous()
    rows = x.as_strided((num_tokens * num_groups, num_columns), (x.stride(1), 1))
    groups = np.empty((num_groups, 3), dtype=np.int64)
    groups[:, 0] = groups[:, 1] = np.arange(num_groups)
    groups[:, 2] = num_tokens
    return _run(rows, groups, num_groups, weight, None).view(num_tokens, num_groups, weight.num_rows)


def _run(
    x: torch.Tensor,  # [R, K] rows of contiguous elements
    groups: np.ndarray,  # [n, 3] int64: weight, first row, rows
    row_step: int,  # from one row of a group to the next
    weight: PackedWeight,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    num_rows, num_columns = x.shape
    is_float = x.dtype == torch.float32
    assert num_columns == weight.num_columns
    assert weight.dtype == x.dtype
    assert groups.dtype == np.int64
    assert groups.flags.c_contiguous
    out = torch.empty((num_rows, weight.num_rows), dtype=out_dtype or x.dtype)
    assert out.dtype in (torch.float32, torch.bfloat16)
    if not num_rows:
        return out
    failed = loaded_library().released.grouped_linear(
        num_threads(),
        len(groups),
        groups.ctypes.data,
        row_step,
        num_rows,
        weight.num_rows,
        num_columns,
        is_float,
        x.data_ptr(),
        x.stride(0),
        weight.data.data_ptr(),
        out.data_ptr(),
        out.dtype == torch.float32,
    )
    check_memory(failed)
    return out
