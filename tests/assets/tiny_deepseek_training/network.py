"""DeepSeek-V3 with one MTP module, in plain torch, for training and for direct evaluation: no cache, whole windows.

Modules carry the checkpoint's names; experts are stacked and split when the checkpoint is written.
Equations of the DeepSeek-V3 report (arXiv 2412.19437), sections 2.1 and 2.2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.assets.tiny_deepseek_training.shape import Shape


def matrix(*size: int, zero: bool = False) -> nn.Parameter:
    """A weight [..., out, in]; zero for the last projection of a branch, so that layers start as the identity."""
    return nn.Parameter(torch.zeros(*size) if zero else torch.randn(*size) * 0.5 * size[-1] ** -0.5)


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, zero: bool = False):
        super().__init__()
        self.weight = matrix(out_features, in_features, zero=zero)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotate_interleaved(
    x: Tensor,  # [B, heads, L, rope]
    positions: Tensor,  # [L]
    theta: float,
) -> Tensor:
    """Pairs (2i, 2i+1) turned by position · theta^(-2i/rope)."""
    size = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = positions[:, None].float() * frequencies  # [L, rope / 2]
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention in the naive form: keys and values expanded from the latent (section 2.1.1)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        self.q_a_proj = Linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, shape.rms_norm_eps)
        self.q_b_proj = Linear(shape.q_lora_rank, heads * shape.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, shape.rms_norm_eps)
        self.kv_b_proj = Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = Linear(heads * shape.v_head_dim, shape.hidden_size, zero=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        shape = self.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (-1, shape.qk_head_dim)).transpose(1, 2)  # [B, heads, L, qk]
        q_nope, q_rope = query.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.unflatten(-1, (shape.num_attention_heads, -1)).transpose(1, 2)
        k_nope, value = expanded.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=-1)

        q_rope = rotate_interleaved(q_rope, positions, shape.rope_theta)
        k_rope = rotate_interleaved(k_rope.unsqueeze(1), positions, shape.rope_theta)
        query = torch.cat((q_nope, q_rope), dim=-1)
        key = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        # The fused attention wants values as wide as keys; the zeros are cut off again.
        value = F.pad(value, (0, shape.qk_head_dim - shape.v_head_dim))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., : shape.v_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DenseMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores, groups, and a bias that only chooses (section 2.1.2)."""

    e_score_correction_bias: Tensor  # [E]
    load: Tensor  # [E]: share of the last batch's tokens

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.n_routed_experts, shape.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.register_buffer("load", torch.zeros(shape.n_routed_experts), persistent=False)

    def forward(
        self,
        x: Tensor,  # [..., H]
    ) -> Tensor:
        """The weight of every expert for every token, [..., E], zero where not chosen."""
        shape = self.shape
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        with torch.no_grad():
            choice = (scores + self.e_score_correction_bias).unflatten(-1, (shape.n_group, -1))
            group_scores = choice.topk(2, dim=-1).values.sum(-1)
            kept = group_scores.topk(shape.topk_group, dim=-1).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
            choice = choice.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
            chosen = choice.topk(shape.num_experts_per_tok, dim=-1).indices
            mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
            if self.training:
                self.load.copy_(mask.flatten(0, -2).mean(0))
        weights = scores * mask
        if shape.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * shape.routed_scaling_factor

    def balance(self, rate: float) -> None:
        """Auxiliary-loss-free balancing: experts above the mean load lose `rate` of bias, those below gain it."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)


class Experts(nn.Module):
    """All routed experts, stacked.

    Every expert runs on every token with weight zero where it was not chosen: at this size one large matrix product
    is faster than gathering tokens by expert.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        sizes = shape.n_routed_experts, shape.moe_intermediate_size, shape.hidden_size
        self.gate_proj = matrix(*sizes)
        self.up_proj = matrix(*sizes)
        self.down_proj = matrix(sizes[0], sizes[2], sizes[1], zero=True)

    def forward(
        self,
        x: Tensor,  # [..., H]
        weights: Tensor,  # [..., E]
    ) -> Tensor:
        inner = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))
        inner = inner.unflatten(-1, self.gate_proj.shape[:2]) * weights.unsqueeze(-1).to(inner.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = DenseMLP(shape.hidden_size, shape.moe_intermediate_size * shape.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape, is_dense: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = DenseMLP(shape.hidden_size, shape.intermediate_size) if is_dense else MoE(shape)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedHead(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """The multi-token prediction module (section 2.2): a decoder layer over [next token, hidden state]."""

    def __init__(self, shape: Shape):
        super().__init__(shape, is_dense=False)
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.shared_head = SharedHead(shape)

    def draft(
        self,
        hidden: Tensor,  # [B, L, H]: of row p, the target's hidden state at p or the last draft step's output at p - 1
        embedded: Tensor,  # [B, L, H]: of row p, the embedding of token p + 1
        positions: Tensor,  # [L]
    ) -> Tensor:
        """Hidden states whose logits predict token p + 2, and which the next draft step takes as `hidden`."""
        embedded = embedded * (positions != 0)[:, None]
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        return self.shared_head.norm(self(self.eh_proj(joined), positions))


class Trunk(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        layers = [DecoderLayer(shape, i < shape.first_k_dense_replace) for i in range(shape.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers, MTPLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size, zero=True)

    @property
    def mtp(self) -> MTPLayer:
        layer = self.model.layers[-1]
        assert isinstance(layer, MTPLayer)
        return layer

    @property
    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def hidden(
        self,
        token_ids: Tensor,  # [B, L]
    ) -> Tensor:
        """Hidden states after the final norm, [B, L, H]."""
        positions = torch.arange(token_ids.shape[1])
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers[: self.shape.num_hidden_layers]:
            x = layer(x, positions)
        return self.model.norm(x)

    def draft(
        self,
        hidden: Tensor,  # [B, L, H]
        next_ids: Tensor,  # [B, L]
        first_position: int,
    ) -> Tensor:
        positions = torch.arange(first_position, first_position + next_ids.shape[1])
        return self.mtp.draft(hidden, self.model.embed_tokens(next_ids), positions)
