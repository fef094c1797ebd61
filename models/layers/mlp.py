"""The feed-forward part of a decoder layer."""

import torch
from torch import nn

from kernels import ops
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.model_config import ModelConfig


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = [config.intermediate_size] * 2
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, sizes, bias=False, dtype=config.dtype, name="intermediate_size"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=False, dtype=config.dtype, name="intermediate_size"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
