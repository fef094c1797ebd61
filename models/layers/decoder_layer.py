"""The decoder layer."""

import torch
from torch import nn

from kernels.metadata import AttentionMetadata
from models.layers.attention import Attention
from models.layers.latent_attention import LatentAttention
from models.layers.mlp import GatedMLP
from models.layers.moe import MoE
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.model_config import ModelConfig


class DecoderLayer(nn.Module):
    """Attention and an MLP, each on the normed residual stream, each added to it.

    The addition is left to the next norm, which does both at once: between layers the stream is
    `hidden_states + residual`.
    """

    def __init__(self, config: ModelConfig, self_attn: Attention | LatentAttention, mlp: GatedMLP | MoE) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = mlp
        self.kv_spec = self_attn.kv_spec

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        residual: torch.Tensor | None,  # [num_tokens, hidden_size]; None before the first layer
        positions: torch.Tensor,  # [num_tokens]
        kv_layer: tuple[torch.Tensor, ...],
        attention: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # hidden_states, residual
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm.add(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, positions, kv_layer, attention)
        hidden_states, residual = self.post_attention_layernorm.add(hidden_states, residual)
        return self.mlp(hidden_states), residual


def grouped_query_layer(config: ModelConfig, layer_index: int, rotary: RotaryEmbedding) -> DecoderLayer:
    """The layer of Llama and its kin: grouped-query attention and a gated MLP."""
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.dtype)
    return DecoderLayer(config, Attention(config, layer_index, rotary), mlp)
