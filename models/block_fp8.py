"""FP8 weights with one scale a block, as DeepSeek-V3 stores them.

They stay FP8 where kernels read them so and every shard begins with a block; else they are dequantised while they
are read, tensor by tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.packed_weight import BlockScaledWeight
from models.layers.parameter import Shard, UnloadedParameter
from models.weight_index import StoredTensor, WeightIndex

SCALE_SUFFIX = "_scale_inv"  # despite the name a multiplier
WEIGHT_DTYPE, SCALE_DTYPE = "F8_E4M3", "F32"


@dataclass(frozen=True)
class BlockScaledTensor:
    """weight[i, j] * scale[i // block rows, j // block columns]; read like any `StoredTensor`."""

    weight: StoredTensor
    scale: StoredTensor
    block_size: tuple[int, int]  # rows, columns

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.float32

    def read_into(self, part: tuple[slice, ...], out: torch.Tensor) -> None:
        """Some of the tensor, into `out` of any dtype. A row of blocks is widened at a time, never the whole."""
        rows, columns = part
        weight = self.weight.read(part)
        block_rows, block_columns = self.block_size
        scale = self.scale.read(tuple(_blocks_of(each, size) for each, size in zip(part, self.block_size, strict=True)))
        scale = scale.repeat_interleave(block_columns, dim=1)
        first_column = columns.start % block_columns
        scale = scale[:, first_column : first_column + weight.shape[1]]
        for block, band in _bands(rows, block_rows):
            out[band].copy_(weight[band].float() * scale[block])


class ScaledBuffer:
    """A parameter that stays FP8 while its tensors arrive."""

    def __init__(self, parameter: UnloadedParameter, block_size: tuple[int, int], device: torch.device) -> None:
        self._dtype, self._block_size = parameter.dtype, block_size
        self._data = torch.empty(parameter.shape, dtype=torch.float8_e4m3fn, device=device)
        blocks = (-(-size // block) for size, block in zip(parameter.shape[-2:], block_size, strict=True))
        self._scale = torch.empty((*parameter.shape[:-2], *blocks), dtype=torch.float32, device=device)

    def take(self, tensor: StoredTensor | BlockScaledTensor, shard: Shard) -> None:
        assert isinstance(tensor, BlockScaledTensor)
        self._data[shard.rows].copy_(tensor.weight.read(shard.part))
        scale_part = tuple(_blocks_of(each, size) for each, size in zip(shard.part, self._block_size, strict=True))
        self._scale[_scale_rows(shard, self._block_size[0])].copy_(tensor.scale.read(scale_part))

    def weight(self) -> BlockScaledWeight:
        return BlockScaledWeight(self._data, self._scale, self._block_size, self._dtype)


def begins_with_blocks(shard: Shard, block_size: tuple[int, int]) -> bool:
    """Whether a shard's blocks are blocks of the parameter too."""
    rows = shard.rows if isinstance(shard.rows, slice) else shard.rows[1]
    part_starts = (part.start % size for part, size in zip(shard.part, block_size, strict=True))
    return rows.start % block_size[0] == 0 and not any(part_starts)


def _scale_rows(shard: Shard, block_rows: int) -> slice | tuple[int, slice]:
    if isinstance(shard.rows, slice):
        return _blocks_of(shard.rows, block_rows)
    return shard.rows[0], _blocks_of(shard.rows[1], block_rows)


def _blocks_of(part: slice, size: int) -> slice:
    return slice(part.start // size, -(-part.stop // size))


def _bands(rows: slice, size: int) -> Iterator[tuple[int, slice]]:
    """(block, its rows within the part), where the part may begin and end in the middle of a block."""
    for block in range(rows.start // size, -(-rows.stop // size)):
        start, end = max(block * size, rows.start), min((block + 1) * size, rows.stop)
        yield block - rows.start // size, slice(start - rows.start, end - rows.start)


def pair_with_scales(index: WeightIndex, block_size: tuple[int, int]) -> dict[str, StoredTensor | BlockScaledTensor]:
    """The tensors of a checkpoint by name, each FP8 weight joined with its scales, which vanish as names.

    A weight is FP8 where the checkpoint has scales for it. Raises ValueError where one has no other, or scales are
    not one a block.
    """
    tensors: dict[str, StoredTensor | BlockScaledTensor] = {}
    for name, tensor in index.tensors.items():
        weight_name = name.removesuffix(SCALE_SUFFIX)
        if weight_name != name:
            if weight_name not in index.tensors:
                raise ValueError(
                    f"{tensor.path}: {name} scales {weight_name}, which the checkpoint does not hold: take a whole one"
                )
            continue
        scale = index.tensors.get(name + SCALE_SUFFIX)
        if scale is not None:
            _check(tensor, scale, block_size)
            tensors[name] = BlockScaledTensor(tensor, scale, block_size)
        elif tensor.dtype == WEIGHT_DTYPE:
            raise ValueError(
                f"{tensor.path}: {name} is FP8 ({WEIGHT_DTYPE}) without {name}{SCALE_SUFFIX}: "
                "use a checkpoint with one scale a block, or one in bfloat16"
            )
        else:
            tensors[name] = tensor
    return tensors


def _check(weight: StoredTensor, scale: StoredTensor, block_size: tuple[int, int]) -> None:
    if weight.dtype != WEIGHT_DTYPE or len(weight.shape) != 2:
        raise ValueError(
            f"{weight.path}: {weight.name} is stored as {weight.dtype} {list(weight.shape)}, and {scale.name} "
            f"is there: use a checkpoint in which it scales a matrix in {WEIGHT_DTYPE}"
        )
    expected = tuple(-(-size // block) for size, block in zip(weight.shape, block_size, strict=True))
    if scale.shape != expected or scale.dtype != SCALE_DTYPE:
        raise ValueError(
            f"{scale.path}: {scale.name} is {scale.dtype} {list(scale.shape)}; use a checkpoint with {SCALE_DTYPE} "
            f"{list(expected)}, one scale a block of {block_size[0]} x {block_size[1]} (weight_block_size in "
            f"config.json) of {weight.name}, whose shape is {list(weight.shape)}"
        )
