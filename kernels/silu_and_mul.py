"""The gated activation of the feed-forward layer, in Triton: silu(gate) * up, in fp32.

Layouts: gate_up [T, 2 * I], gate then up, any row stride; the result [T, I] is dense.
Source: Shazeer, 2020: "GLU variants improve transformer", SwiGLU.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up, out, stride_t, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, blocks of I)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_row = gate_up + row * stride_t
    gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + columns, activated.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
) -> torch.Tensor:  # [T, I]
    """Twin: `kernels.reference.silu_and_mul`."""
    num_tokens, double_width = gate_up.shape
    width = double_width // 2
    assert double_width % 2 == 0
    assert gate_up.stride(1) == 1
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        _silu_and_mul_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK
        )
    return out
