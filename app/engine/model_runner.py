"""Runs a batch through a model and its KV layers."""

import time
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
    def time_pass(self, num_rows: int) -> float:
        """Seconds of a pass over so many sequences of one token each, logits included; nothing is stored."""
        device = self.kv_layers[0][0].device
        rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        attention = AttentionMetadata(
            cu_seqlens_q=rows,
            context_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros((num_rows, 1), dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            max_seqlen_q=1,
            max_context_len=1,
        )
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        start = time.perf_counter()
        logits = self.model.compute_logits(self.model(zeros, zeros, self.kv_layers, attention))
        logits[:, 0].cpu()  # waits for the device
        return time.perf_counter() - start

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
