"""The feed-forward part of a decoder layer."""

import torch
from torch import nn

from kernels import ops
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        name: str = "intermediate_size",  # of the configuration's field
        reduced: bool = True,  # False: the caller sums over ranks
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=False, dtype=dtype, name=name
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=False, dtype=dtype, name=name, reduced=reduced
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.linear_silu_and_mul(x, self.gate_up_proj.weight))
