"""A decoder-only language model on a paged KV cache."""

import torch
from torch import nn

from kernels.metadata import AttentionMetadata
from models.kv_spec import LayerKVSpec
from models.layers.decoder_layer import DecoderLayer
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding, vocab_logits
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.model_config import ModelConfig


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: ModelConfig, decoder_layer: type[DecoderLayer], max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, config.dtype, is_head=config.tie_word_embeddings
        )
        rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, device)
        layers = [decoder_layer(config, i, rotary) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.kv_specs = [layer.kv_spec for layer in layers]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        kv_layers: list[tuple[torch.Tensor, ...]],  # one a layer
        attention: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        hidden_states: torch.Tensor = self.embed_tokens(token_ids)
        residual: torch.Tensor | None = None
        for layer, kv_layer in zip(self.layers, kv_layers, strict=True):
            hidden_states, residual = layer(hidden_states, residual, positions, kv_layer, attention)
        assert residual is not None  # there is a layer
        hidden_states, _ = self.norm.add(hidden_states, residual)
        return hidden_states


class CausalLM(nn.Module):
    """A decoder and its output head. Built without weights: `models.loader` brings them."""

    def __init__(
        self, config: ModelConfig, decoder_layer: type[DecoderLayer], max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, decoder_layer, max_positions, device)
        self.lm_head = (
            None if config.tie_word_embeddings else ParallelLMHead(config.vocab_size, config.hidden_size, config.dtype)
        )

    def kv_specs(self) -> list[LayerKVSpec]:
        """What each layer stores of a token on this rank."""
        return list(self.model.kv_specs)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        kv_layers: list[tuple[torch.Tensor, ...]],  # one a layer
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states after the final norm: [num_tokens, hidden_size]. Stores the tokens' keys and values."""
        return self.model(token_ids, positions, kv_layers, attention)

    def compute_logits(
        self,
        hidden_states: torch.Tensor,  # [num_rows, hidden_size]
    ) -> torch.Tensor:
        """fp32 [num_rows, vocab_size]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return vocab_logits(hidden_states, head.weight)
