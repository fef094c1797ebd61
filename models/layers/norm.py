"""Root mean square normalisation."""

import torch
from torch import nn

from kernels import ops
from models.layers.parameter import UnloadedParameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = UnloadedParameter.replicated(size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        residual: torch.Tensor,  # [num_tokens, size]; may be overwritten
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum): what a layer adds to the residual stream, and what the next one reads."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
