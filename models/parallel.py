"""The tensor-parallel group of this process: the one module with global state."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallelGroup:
    """`rank` holds share `rank` of every sharded parameter; a group of one needs no process group."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


_group = TensorParallelGroup()


def set_tensor_parallel_group(group: TensorParallelGroup) -> None:
    """Before a model is built: layers take their shares from the group at construction."""
    global _group
    assert 0 <= group.rank < group.size
    _group = group


def tp_rank() -> int:
    return _group.rank


def tp_size() -> int:
    return _group.size


def share(total: int, name: str) -> int:
    """What one rank holds of `total`.

    Raises ValueError, naming the configuration's field, where the ranks cannot share evenly.
    """
    if total % _group.size:
        raise ValueError(f"{name} is {total}, which tensor_parallel_size {_group.size} does not divide: use a divisor")
    return total // _group.size


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in place."""
    if _group.size > 1:
        dist.all_reduce(tensor, group=_group.process_group)
    return tensor


def all_gather(
    tensor: torch.Tensor,  # [num_rows, share]
) -> torch.Tensor:  # [num_rows, size * share]
    """Every rank's columns, in the order of ranks."""
    if _group.size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(_group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=_group.process_group)
    return torch.cat(parts, dim=-1)
