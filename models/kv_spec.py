"""What an attention layer stores of a token."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerKVSpec:
    """Shapes of one layer's pool entries a token: grouped-query attention has two, K and V."""

    shapes: tuple[tuple[int, ...], ...]  # grouped-query attention: ((num_kv_heads, head_dim),) * 2
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize
