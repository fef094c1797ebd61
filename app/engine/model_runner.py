"""Runs a batch through a model and its KV layers."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from app.engine.batch import Batch
from kernels.metadata import AttentionMetadata


class CausalLM(Protocol):
    """What the engine needs of a network."""

    def __call__(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_layers: list[tuple[torch.Tensor, ...]],
        attention: AttentionMetadata,
    ) -> torch.Tensor: ...  # [num_tokens, hidden_size], after the final norm

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...  # fp32 [num_rows, vocab_size]


@dataclass(frozen=True)
class ModelOutput:
    hidden_states: torch.Tensor  # [num_tokens, hidden_size]
    logits: torch.Tensor  # fp32 [num_logits, vocab_size]: the batch's logits_rows


class ModelRunner:
    """The network and its share of the KV pool."""

    def __init__(self, model: CausalLM, kv_layers: list[tuple[torch.Tensor, ...]]) -> None:
        self.model = model
        self.kv_layers = kv_layers

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ModelOutput:
        hidden_states = self.model(batch.token_ids, batch.positions, self.kv_layers, batch.attention)
        return ModelOutput(hidden_states, self.logits(hidden_states, batch.logits_rows))

    @torch.inference_mode()
    def logits(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        rows: np.ndarray,  # [num_rows] int64
    ) -> torch.Tensor:
        """Logits of some of a batch's rows; fp32 [num_rows, vocab_size]."""
        if len(rows) < len(hidden_states):
            hidden_states = hidden_states[torch.from_numpy(rows).to(hidden_states.device)]
        return self.model.compute_logits(hidden_states)
