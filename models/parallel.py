"""The tensor-parallel group of this process: the one module with global state."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

PACKET_SIZE = 1024
"""Integers, their number included, that rank 0 sends at once: a step of 32 sequences with 8 drafts fits."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """`rank` holds share `rank` of every sharded parameter; a group of one needs no process group."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None  # of the device: what layers exchange
    control_group: dist.ProcessGroup | None = None  # of the hosts: what rank 0 tells the others
    expert_parallel: bool = False  # a rank holds some experts whole, in place of a share of every expert


ALONE = TensorParallelGroup()

_group = ALONE


def set_tensor_parallel_group(group: TensorParallelGroup) -> None:
    """Before a model is built: layers take their shares from the group at construction."""
    global _group
    assert 0 <= group.rank < group.size
    _group = group


@contextmanager
def tensor_parallel_group(group: TensorParallelGroup) -> Iterator[None]:
    """Within it networks are built, and run, in `group`."""
    before = _group
    set_tensor_parallel_group(group)
    try:
        yield
    finally:
        set_tensor_parallel_group(before)


def tp_rank() -> int:
    return _group.rank


def tp_size() -> int:
    return _group.size


def experts_are_whole() -> bool:
    """Ranks share out the experts, not the features of each."""
    return _group.expert_parallel


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


def gather(
    tensor: torch.Tensor,  # [num_rows, share]
) -> torch.Tensor:  # [num_rows, size * share] on rank 0, no rows elsewhere
    """Every rank's columns, in the order of ranks, where decisions are taken."""
    if _group.size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(_group.size)] if _group.rank == 0 else None
    dist.gather(tensor.contiguous(), parts, dst=0, group=_group.process_group)
    return tensor.new_empty((0, _group.size * tensor.shape[1])) if parts is None else torch.cat(parts, dim=-1)


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank, in place; all must know shape and dtype."""
    if _group.size > 1:
        dist.broadcast(tensor, src=0, group=_group.process_group)
    return tensor


def tell(values: np.ndarray) -> None:
    """Rank 0's part of `listen`: sends int64 [n] to all others, in one packet where n is small."""
    assert _group.rank == 0
    packet = np.zeros(PACKET_SIZE, dtype=np.int64)
    packet[0] = len(values)
    head = values[: PACKET_SIZE - 1]
    packet[1 : 1 + len(head)] = head
    _broadcast_from_host(packet)
    if len(values) > len(head):
        _broadcast_from_host(np.ascontiguousarray(values[len(head) :]))


def listen() -> np.ndarray:
    """What rank 0 tells: int64 [n]. Waits for it."""
    assert _group.rank > 0
    packet = np.zeros(PACKET_SIZE, dtype=np.int64)
    _broadcast_from_host(packet)
    num = int(packet[0])
    if num < PACKET_SIZE:
        return packet[1 : 1 + num]
    rest = np.zeros(num - (PACKET_SIZE - 1), dtype=np.int64)
    _broadcast_from_host(rest)
    return np.concatenate([packet[1:], rest])


def least(value: int) -> int:
    """The smallest of what the ranks give."""
    if _group.size == 1:
        return value
    smallest = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=_group.control_group)
    return int(smallest)


def _broadcast_from_host(values: np.ndarray) -> None:
    dist.broadcast(torch.from_numpy(values), src=0, group=_group.control_group)
