"""A mixture of experts: routed ones, each on its own tokens, and shared ones on all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from kernels import ops
from kernels.packed_weight import Weight
from models import parallel
from models.layers.linear import RowShare
from models.layers.mlp import GatedMLP
from models.layers.parameter import Shard, UnloadedParameter
from models.layers.router import Router
from models.model_config import ModelConfig

SIZE_NAME = "moe_intermediate_size"  # what ranks share out of every expert


@dataclass(frozen=True)
class ExpertShare:
    """The experts of which this rank holds something: some of them whole, or a share of each."""

    num_experts: int  # of the model
    first: int
    num_held: int

    @staticmethod
    def of_rank(num_experts: int) -> "ExpertShare":
        if not parallel.experts_are_whole():
            return ExpertShare(num_experts, 0, num_experts)
        num_held = parallel.share(num_experts, "n_routed_experts")
        return ExpertShare(num_experts, parallel.tp_rank() * num_held, num_held)

    def features(self, total: int) -> RowShare:
        """This rank's features of every expert that it holds."""
        return RowShare(total, 0, total) if parallel.experts_are_whole() else RowShare.even(total, SIZE_NAME)


class GroupedLinear(nn.Module):
    """One linear layer an expert, as one weight; the checkpoint stores every expert's matrices apart."""

    weight: Weight  # [num_groups, out_features, in_features], this rank's share

    def __init__(
        self, shape: tuple[int, int], shards: Sequence[Shard], experts: ExpertShare, dtype: torch.dtype
    ) -> None:
        super().__init__()
        num_groups, self.num_stored = experts.num_held, experts.num_experts
        self.groups = range(experts.first, experts.first + num_groups)  # of those stored
        shards_of_groups = []
        for group in range(num_groups):
            for shard in shards:
                assert isinstance(shard.rows, slice)  # of the matrix of a group
                shards_of_groups.append(replace(shard, rows=(group, shard.rows)))
        self.weight = UnloadedParameter((num_groups, *shape), dtype, tuple(shards_of_groups), packed=True)

    @classmethod
    def column_parallel(
        cls, in_features: int, out_features: Sequence[int], experts: ExpertShare, dtype: torch.dtype
    ) -> "GroupedLinear":
        """A rank computes its share of the output features of its experts."""
        shards, offset = [], 0
        for features in out_features:
            share = experts.features(features)
            shards.append(Shard.of_rows((features, in_features), share.start, share.num_rows, offset))
            offset += share.num_rows
        return cls((offset, in_features), shards, experts, dtype)

    @classmethod
    def row_parallel(
        cls, in_features: int, out_features: int, experts: ExpertShare, dtype: torch.dtype
    ) -> "GroupedLinear":
        """A rank takes its share of the input features of its experts; outputs are to be summed over ranks."""
        share = experts.features(in_features)
        rows, columns = slice(0, out_features), slice(share.start, share.start + share.num_rows)
        shard = Shard((out_features, in_features), (rows, columns), rows)
        return cls((out_features, share.num_rows), [shard], experts, dtype)

    def forward(
        self,
        x: torch.Tensor,  # [num_rows, in_features], the rows of expert 0 first
        group_sizes: torch.Tensor,  # [num_groups] int64
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        return ops.grouped_linear(x, group_sizes, self.weight, out_dtype)


class Experts(nn.Module):
    """The routed experts. Rows are sorted by expert, so that each expert is one product and an idle one is none."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.share = ExpertShare.of_rank(num_experts)
        self.gate_up_proj = GroupedLinear.column_parallel(hidden_size, [intermediate_size] * 2, self.share, dtype)
        self.down_proj = GroupedLinear.row_parallel(intermediate_size, hidden_size, self.share, dtype)

    def forward(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        weights: torch.Tensor,  # fp32 [num_tokens, experts a token]
        expert_ids: torch.Tensor,  # int64, the same shape
    ) -> torch.Tensor:  # fp32 [num_tokens, hidden_size], to be summed over ranks
        share, ids = self.share, expert_ids.flatten()
        if share.num_held < share.num_experts:
            ids = (ids - share.first) % share.num_experts  # this rank's experts come first
        order = ids.argsort(stable=True)  # a row for each choice: choice i is of token i // experts a token
        group_sizes = torch.zeros(share.num_experts, dtype=torch.int64, device=x.device)
        group_sizes.scatter_add_(0, ids, torch.ones_like(ids))
        group_sizes = group_sizes[: share.num_held]
        inner = ops.silu_and_mul(self.gate_up_proj(x[order // expert_ids.shape[1]], group_sizes))
        rows = self.down_proj(inner, group_sizes, out_dtype=torch.float32)
        of_choices = torch.empty_like(rows)
        of_choices[order] = rows
        if share.num_held < share.num_experts:  # other ranks' choices are rows of no group here
            of_choices.masked_fill_((ids >= share.num_held).unsqueeze(1), 0.0)
        # Summed in the order of a token's choices, which no other token has a part in.
        return (of_choices.view(*expert_ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


class MoE(nn.Module):
    """sum of weight * expert(x) over the chosen experts, + the shared experts (DeepSeek-V3 report, equation 12)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.gate = Router(moe, config.hidden_size)
        self.experts = Experts(moe.n_routed_experts, config.hidden_size, moe.moe_intermediate_size, config.dtype)
        self.shared_experts = GatedMLP(
            config.hidden_size,
            moe.moe_intermediate_size * moe.n_shared_experts,
            config.dtype,
            name="moe_intermediate_size * n_shared_experts",
            reduced=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.experts(x, *self.gate(x))
        return parallel.all_reduce((routed + self.shared_experts(x)).to(x.dtype))
