"""Parameters that are not loaded yet, and what they take from the checkpoint."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from kernels import ops
from kernels.packed_weight import BlockScaledWeight, Weight


@dataclass(frozen=True)
class Shard:
    """This rank's part of one tensor in the checkpoint, and the rows of the parameter that it fills."""

    stored_shape: tuple[int, ...]  # of the whole tensor
    part: tuple[slice, ...]  # one a dimension of the stored tensor
    rows: slice | tuple[int, slice]  # with the group's index where the parameter is several matrices

    @staticmethod
    def whole(*shape: int) -> "Shard":
        return Shard(shape, tuple(slice(0, size) for size in shape), slice(0, shape[0]))

    @staticmethod
    def of_rows(stored_shape: tuple[int, ...], start: int, num_rows: int, offset: int = 0) -> "Shard":
        """Rows `start : start + num_rows` of the stored tensor, at rows `offset : ...` of the parameter."""
        rest = tuple(slice(0, size) for size in stored_shape[1:])
        return Shard(stored_shape, (slice(start, start + num_rows), *rest), slice(offset, offset + num_rows))


class UnloadedParameter(nn.Parameter):
    """A parameter on the meta device: a shape, a dtype and the shards that fill it, each from a tensor of its own."""

    shards: tuple[Shard, ...]
    packed: bool  # a matrix that `ops.linear` reads, or several for `ops.grouped_linear`

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, shards: tuple[Shard, ...], packed: bool) -> Self:
        parameter = super().__new__(cls, torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        parameter.shards, parameter.packed = shards, packed
        return parameter

    @classmethod
    def replicated(cls, *shape: int, dtype: torch.dtype) -> Self:
        """A parameter of which every rank holds all."""
        return cls(shape, dtype, (Shard.whole(*shape),), packed=False)


def set_loaded(module: nn.Module, name: str, loaded: torch.Tensor | BlockScaledWeight) -> None:
    """Puts what was loaded in the place of `module`'s unloaded parameter, packed where kernels want it so."""
    unloaded = module.get_parameter(name)
    assert isinstance(unloaded, UnloadedParameter)
    assert loaded.shape == unloaded.shape
    assert loaded.dtype == unloaded.dtype
    weight: Weight = loaded
    if unloaded.packed and isinstance(loaded, torch.Tensor):
        weight = ops.pack_weight(loaded)
    delattr(module, name)
    setattr(module, name, nn.Parameter(weight, requires_grad=False) if isinstance(weight, torch.Tensor) else weight)
