"""A matrix, or several of one shape, in other layouts than a plain tensor's."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedWeight:
    """A weight [num_rows, num_columns] kept once, in the order in which `linear` of the CPU kernels reads it.

    With `num_groups` it is so many matrices one behind the other, for `grouped_linear` and `batched_linear`.
    Only `kernels.cpu` knows the layout of `data`; operators take a PackedWeight wherever they take a plain tensor.
    """

    data: torch.Tensor  # padded to whole tiles, so it may hold more entries than the shape says
    num_rows: int
    num_columns: int
    num_groups: int | None = None  # None: one matrix

    @property
    def shape(self) -> torch.Size:
        matrix = (self.num_rows, self.num_columns)
        return torch.Size(matrix if self.num_groups is None else (self.num_groups, *matrix))

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Of the entries, without what pads them."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BlockScaledWeight:
    """FP8 entries and one scale a block: weight[.., i, j] = data[.., i, j] * scale[.., i // rows, j // columns].

    For GPU kernels, which widen it while they read it.
    """

    data: torch.Tensor  # float8_e4m3fn [N, K] or [G, N, K]
    scale: torch.Tensor  # fp32, one a block
    block_size: tuple[int, int]  # rows, columns
    dtype: torch.dtype  # of the activations that it is multiplied with

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


Weight = torch.Tensor | PackedWeight | BlockScaledWeight
