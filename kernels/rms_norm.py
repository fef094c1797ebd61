"""Root-mean-square norm, alone or after a residual sum, in Triton.

x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, one program a row.

Layouts: x [..., H], up to two leading dimensions of any stride (heads of a wider projection are normed
where they stand); results are dense. Source: Zhang and Sennrich, 2019, equation 4.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    inner,
    x_stride_outer,
    x_stride_inner,
    residual_stride_outer,
    residual_stride_inner,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Grid (rows,); row r is [r // inner, r % inner]. With a residual, residual + x takes the residual's place."""
    row = tl.program_id(0).to(tl.int64)
    outer_index = row // inner
    inner_index = row % inner
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN_SIZE
    x_row = x + outer_index * x_stride_outer + inner_index * x_stride_inner
    wide = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual + outer_index * residual_stride_outer + inner_index * residual_stride_inner
        wide += tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)
        # The norm reads the sum as the next layer will: rounded.
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(residual_row + columns, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / HIDDEN_SIZE
    scaled = wide * tl.rsqrt(mean_square + eps)
    scaled *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN_SIZE + columns, scaled.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,  # [..., H]
    weight: torch.Tensor,  # [H]
    eps: float,
) -> torch.Tensor:
    """Twin: `kernels.reference.rms_norm`."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor,  # [..., H]
    residual: torch.Tensor,  # [..., H]; overwritten by the sum
    weight: torch.Tensor,  # [H]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin: `kernels.reference.add_rms_norm`."""
    assert residual.shape == x.shape
    assert residual.dtype == x.dtype
    return _launch(x, residual, weight, eps), residual


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    hidden_size = x.shape[-1]
    assert 1 <= x.dim() <= 3
    assert weight.shape == (hidden_size,)
    assert x.stride(-1) == weight.stride(0) == 1
    assert residual is None or residual.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    block = triton.next_power_of_2(hidden_size)
    rows = _rows(x)
    residual_rows = rows if residual is None else _rows(residual)
    _rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        rows.shape[1],
        *rows.stride()[:2],
        *residual_rows.stride()[:2],
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A view [outer, inner, H] whose inner size and strides do not vary with the batch: each would be compiled for."""
    if x.dim() == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1])
