"""Which experts a token goes to, and with which weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from kernels import ops
from kernels.packed_weight import Weight
from models.layers.parameter import Shard, UnloadedParameter
from models.model_config import MoEConfig


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """The sigmoid of every second entry of a tensor, which torch takes one by one.

    Of entries side by side it takes vectors, and what is left over at the end it rounds in another way: a token's
    scores would hang on how many tokens there are.
    """
    return torch.stack((logits, logits), dim=-1)[..., 0].sigmoid()


SCORING_FUNCS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


@dataclass(frozen=True)
class TopkMethod:
    scoring_func: str  # the one it is defined with
    has_bias: bool  # scores are corrected for the choice, not for the weights
    score_groups: Callable[[torch.Tensor], torch.Tensor] | None  # [T, groups, experts a group] -> [T, groups]


TOPK_METHODS = {
    "greedy": TopkMethod("softmax", has_bias=False, score_groups=None),
    "group_limited_greedy": TopkMethod("softmax", has_bias=False, score_groups=lambda scores: scores.amax(-1)),
    "noaux_tc": TopkMethod("sigmoid", has_bias=True, score_groups=lambda scores: scores.topk(2, dim=-1).values.sum(-1)),
}


class Router(nn.Module):
    """Scores all experts in fp32, keeps the best groups, then the best experts within them.

    DeepSeek-V3 report, section 2.1.2: the bias that balances the load enters the choice and not the weights.
    """

    weight: Weight  # fp32 [n_routed_experts, hidden_size]

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.method = TOPK_METHODS[config.topk_method]
        self.score = SCORING_FUNCS[self.method.scoring_func]
        shape = (config.n_routed_experts, hidden_size)
        self.weight = UnloadedParameter(shape, torch.float32, (Shard.whole(*shape),), packed=True)
        self.e_score_correction_bias = (
            UnloadedParameter.replicated(config.n_routed_experts, dtype=torch.float32) if self.method.has_bias else None
        )

    def forward(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # weights fp32, expert ids int64: [num_tokens, num_experts_per_tok]
        scores = self.score(ops.linear(x.float(), self.weight))
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if self.method.score_groups is not None and self.config.topk_group < self.config.n_group:
            grouped = choice.unflatten(1, (self.config.n_group, -1))
            kept = self.method.score_groups(grouped).topk(self.config.topk_group, dim=-1).indices
            dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, kept, False)
            choice = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
        expert_ids = choice.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # as the reference code guards it
        return weights * self.config.routed_scaling_factor, expert_ids
