"""The decoder layer of Llama and its kin."""

import torch
from torch import nn

from kernels.metadata import AttentionMetadata
from models.layers.attention import Attention
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.model_config import ModelConfig


class DecoderLayer(nn.Module):
    """Attention and a gated MLP, each on the normed residual stream, each added to it.

    The addition is left to the next norm, which does both at once: between layers the stream is
    `hidden_states + residual`.
    """

    def __init__(self, config: ModelConfig, layer_index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.self_attn = Attention(config, layer_index, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = GatedMLP(config)
        self.kv_spec = self.self_attn.kv_spec

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
