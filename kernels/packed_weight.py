"""A matrix laid out for the CPU kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedWeight:
    """A weight [num_rows, num_columns] kept once, in the order in which `linear` of the CPU kernels reads it.

    Only `kernels.cpu` knows the layout of `data`; `linear` and `embedding` take a PackedWeight
    wherever they take a plain tensor.
    """

    data: torch.Tensor  # padded to whole tiles, so it may hold more than num_rows * num_columns entries
    num_rows: int
    num_columns: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.num_columns))

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device


Weight = torch.Tensor | PackedWeight
