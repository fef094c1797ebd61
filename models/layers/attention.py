"""Grouped-query attention over the paged KV cache."""

import torch
from torch import nn

from kernels import ops
from kernels.metadata import AttentionMetadata
from models.kv_spec import LayerKVSpec
from models.layers.linear import QKVParallelLinear, RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.model_config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention of one layer, within the layer's sliding window where it has one."""

    def __init__(self, config: ModelConfig, layer_index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer_index]
        self.rms_norm_eps = config.rms_norm_eps
        self.rotary = rotary
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=config.qkv_bias,
            dtype=config.dtype,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_bias,
            dtype=config.dtype,
            name="num_attention_heads",
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype) if config.qk_norm else None
        self.kv_spec = LayerKVSpec(((self.qkv_proj.num_kv_heads, config.head_dim),) * 2, config.dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        positions: torch.Tensor,  # [num_tokens]
        kv_layer: tuple[torch.Tensor, ...],  # keys and values [num_blocks, block_size, num_kv_heads, head_dim]
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        key_cache, value_cache = kv_layer
        attended = ops.qkv_attention(
            positions,
            self.qkv_proj(hidden_states),
            self.rotary.cos_sin_cache,
            self.rotary.interleaved,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.rms_norm_eps,
            key_cache,
            value_cache,
            attention,
            self.scale,
            self.sliding_window,
        )
        return self.o_proj(attended)
