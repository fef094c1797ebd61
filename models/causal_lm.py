"""A decoder-only language model on a paged KV cache."""

from collections.abc import Callable

import torch
from torch import nn

from kernels.metadata import AttentionMetadata
from models.kv_spec import LayerKVSpec
from models.layers.decoder_layer import DecoderLayer
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding, vocab_logits
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.model_config import ModelConfig

BuildDecoderLayer = Callable[[ModelConfig, int, RotaryEmbedding], DecoderLayer]


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: ModelConfig, decoder_layer: BuildDecoderLayer, max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, config.dtype, is_head=config.tie_word_embeddings
        )
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, device)
        layers = [decoder_layer(config, i, self.rotary) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.kv_specs = [layer.kv_spec for layer in layers]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        kv_layers: list[tuple[torch.Tensor, ...]],  # one a layer
        attention: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # hidden states after the final norm, and before it
        hidden_states: torch.Tensor = self.embed_tokens(token_ids)
        residual: torch.Tensor | None = None
        for layer, kv_layer in zip(self.layers, kv_layers, strict=True):
            hidden_states, residual = layer(hidden_states, residual, positions, kv_layer, attention)
        assert residual is not None  # there is a layer
        return self.norm.add(hidden_states, residual)


class CausalLM(nn.Module):
    """A decoder and its output head. Built without weights: `models.loader` brings them.

    `hidden_is_normed`, true unless a drafter that wants it otherwise sets it: hidden states are those after the
    final norm, not before it.
    """

    def __init__(
        self, config: ModelConfig, decoder_layer: BuildDecoderLayer, max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden_is_normed = True
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
        """Hidden states for `compute_logits`: [num_tokens, hidden_size]. Stores the tokens' keys and values."""
        normed, unnormed = self.model(token_ids, positions, kv_layers, attention)
        return normed if self.hidden_is_normed else unnormed

    def compute_logits(
        self,
        hidden_states: torch.Tensor,  # [num_rows, hidden_size]
    ) -> torch.Tensor:
        """fp32 [num_rows, vocab_size]."""
        if not self.hidden_is_normed:
            hidden_states = self.model.norm(hidden_states)
        return vocab_logits(hidden_states, self.head.weight)

    @property
    def head(self) -> VocabParallelEmbedding | ParallelLMHead:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head
