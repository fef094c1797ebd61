"""Linear layers whose weights are shared out among tensor-parallel ranks.

Column-parallel layers split the output features and need no communication; a row-parallel layer
splits the input features and sums over ranks. Megatron-LM (Shoeybi et al., 2019, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kernels import ops
from kernels.packed_weight import Weight
from models import parallel
from models.layers.parameter import Shard, UnloadedParameter


@dataclass(frozen=True)
class RowShare:
    """Rows of a stored matrix of which this rank holds some."""

    num_stored: int
    start: int
    num_rows: int

    @staticmethod
    def even(num_stored: int, name: str) -> "RowShare":
        """As many rows for every rank; `name` is the configuration's field that says how many there are."""
        num_rows = parallel.share(num_stored, name)
        return RowShare(num_stored, parallel.tp_rank() * num_rows, num_rows)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b; this rank computes its share of the output features."""

    weight: Weight  # [out_features / tp_size, in_features]

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, name: str) -> None:
        super().__init__()
        self.weight, self.bias = _column_parameters(in_features, [RowShare.even(out_features, name)], bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel layers on the same input, as one matrix: gate_proj and up_proj."""

    weight: Weight  # [sum(out_features) / tp_size, in_features]

    def __init__(
        self, in_features: int, out_features: Sequence[int], bias: bool, dtype: torch.dtype, name: str
    ) -> None:
        super().__init__()
        shares = [RowShare.even(features, name) for features in out_features]
        self.weight, self.bias = _column_parameters(in_features, shares, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class ReplicatedLinear(nn.Module):
    """One or several layers on the same input as one matrix, which every rank holds whole."""

    weight: Weight  # [sum(out_features), in_features]

    def __init__(self, in_features: int, out_features: Sequence[int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        shares = [RowShare(features, 0, features) for features in out_features]
        self.weight, self.bias = _column_parameters(in_features, shares, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class QKVParallelLinear(nn.Module):
    """q_proj, k_proj and v_proj as one matrix, shared out by heads.

    With more ranks than KV heads, ranks that hold query heads of the same group hold the same KV head.
    """

    weight: Weight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size], this rank's heads

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        rank, size = parallel.tp_rank(), parallel.tp_size()
        if max(size, num_kv_heads) % min(size, num_kv_heads):
            raise ValueError(
                f"num_key_value_heads is {num_kv_heads}, tensor_parallel_size {size}: one must divide the other"
            )
        self.num_heads = parallel.share(num_heads, "num_attention_heads")
        self.num_kv_heads = max(num_kv_heads // size, 1)
        first_kv_head = rank * num_kv_heads // size
        query = RowShare(num_heads * head_dim, rank * self.num_heads * head_dim, self.num_heads * head_dim)
        key = RowShare(num_kv_heads * head_dim, first_kv_head * head_dim, self.num_kv_heads * head_dim)
        self.weight, self.bias = _column_parameters(hidden_size, [query, key, key], bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x W^T, + b; this rank holds its share of the input features."""

    weight: Weight  # [out_features, in_features / tp_size]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        name: str,
        reduced: bool = True,  # False: the caller sums over ranks, with what else it has to sum
    ) -> None:
        super().__init__()
        self.reduced = reduced
        num_columns = parallel.share(in_features, name)
        columns = slice(parallel.tp_rank() * num_columns, (parallel.tp_rank() + 1) * num_columns)
        rows = slice(0, out_features)
        shard = Shard((out_features, in_features), (rows, columns), rows)
        self.weight = UnloadedParameter((out_features, num_columns), dtype, (shard,), packed=True)
        self.bias = UnloadedParameter.replicated(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if parallel.tp_rank() == 0 else None  # the sum holds it once
        out = ops.linear(x, self.weight, bias)
        return parallel.all_reduce(out) if self.reduced else out


def _column_parameters(
    in_features: int,
    shares: Sequence[RowShare],
    bias: bool,
    dtype: torch.dtype,
) -> tuple[UnloadedParameter, UnloadedParameter | None]:
    """Weight and bias of matrices that are stored apart and kept one below the other."""
    weight_shards, bias_shards, offset = [], [], 0
    for share in shares:
        weight_shards.append(Shard.of_rows((share.num_stored, in_features), share.start, share.num_rows, offset))
        bias_shards.append(Shard.of_rows((share.num_stored,), share.start, share.num_rows, offset))
        offset += share.num_rows
    weight = UnloadedParameter((offset, in_features), dtype, tuple(weight_shards), packed=True)
    return weight, UnloadedParameter((offset,), dtype, tuple(bias_shards), packed=False) if bias else None
