"""Drafters whose weights are shared out among ranks: rank 0 runs their passes, and the others with it.

Proposers know nothing of it. On rank 0 they run a network of this file, which first tells the other ranks what it is
about to run; there a `DrafterFollower` does the same. So what a proposer does on rank 0 alone, a fault included,
cannot set the ranks apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.model_runner import CausalLM
from kernels.metadata import AttentionMetadata
from models import parallel
from models.drafters.deepseek_mtp import DeepseekMTP

PASS, LOGITS = 1, 2  # what a message of rank 0 asks for, beside `step_decision.STEP`


class LedDraftModel:
    """A causal language model on rank 0 of its ranks."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __call__(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        kv_layers: list[tuple[torch.Tensor, ...]],
        attention: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        _lead_pass(0, token_ids, positions, attention, None)
        return self._model(token_ids, positions, kv_layers, attention)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        _lead_logits(0, hidden_states)
        return self._model.compute_logits(hidden_states)


class LoneDraftModel:
    """A causal language model that rank 0 holds whole, beside a target that ranks share."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __call__(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        kv_layers: list[tuple[torch.Tensor, ...]],
        attention: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        with parallel.tensor_parallel_group(parallel.ALONE):
            return self._model(token_ids, positions, kv_layers, attention)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with parallel.tensor_parallel_group(parallel.ALONE):
            return self._model.compute_logits(hidden_states)


class LedMTP(DeepseekMTP):
    """MTP modules on rank 0 of their ranks: shares all that `modules` holds."""

    def __init__(self, modules: DeepseekMTP) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(vars(modules))

    def forward(
        self,
        module_index: int,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: tuple[torch.Tensor, ...],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        _lead_pass(module_index, token_ids, positions, attention, hidden_states)
        return super().forward(module_index, token_ids, hidden_states, positions, kv_layer, attention)

    def logits(self, module_index: int, outputs: torch.Tensor) -> torch.Tensor:
        _lead_logits(module_index, outputs)
        return super().logits(module_index, outputs)


@dataclass(frozen=True)
class DrafterPass:
    """What every rank of a drafter runs at once."""

    module_index: int  # 0 for a draft model
    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    hidden_states: torch.Tensor | None  # [num_tokens, hidden_size] that an MTP module is given


class DrafterFollower:
    """This rank's share of a drafter, run when rank 0 runs its own."""

    def __init__(
        self,
        run: Callable[[DrafterPass], torch.Tensor],
        logits: Callable[[int, torch.Tensor], torch.Tensor],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._run, self._logits = run, logits
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    @torch.inference_mode()
    def take_part(self, message: np.ndarray) -> None:
        """Receives what belongs to a message of rank 0, and runs it."""
        kind, module_index, num_hidden_rows = message[:3].tolist()
        if kind == PASS:
            ints = _receive_ints(message[3:].tolist(), self._device)
            self._run(DrafterPass(module_index, *ints, self._receive_hidden_states(num_hidden_rows)))
        else:
            assert kind == LOGITS
            hidden_states = self._receive_hidden_states(num_hidden_rows)
            assert hidden_states is not None
            self._logits(module_index, hidden_states)

    def _receive_hidden_states(self, num_rows: int) -> torch.Tensor | None:
        if num_rows == 0:
            return None
        shape = (num_rows, self._hidden_size)
        return parallel.broadcast(torch.empty(shape, dtype=self._dtype, device=self._device))


def _lead_pass(
    module_index: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionMetadata,
    hidden_states: torch.Tensor | None,
) -> None:
    tensors = (token_ids, positions, attention.cu_seqlens_q, attention.context_lens, attention.block_tables)
    num_seqs, num_blocks = attention.block_tables.shape
    sizes = [len(token_ids), num_seqs, num_blocks, attention.max_seqlen_q, attention.max_context_len]
    num_hidden_rows = 0 if hidden_states is None else len(hidden_states)
    parallel.tell(np.array([PASS, module_index, num_hidden_rows, *sizes], dtype=np.int64))
    parallel.broadcast(torch.cat([each.flatten().long() for each in (*tensors, attention.slot_mapping)]))
    if hidden_states is not None:
        parallel.broadcast(hidden_states.contiguous())


def _lead_logits(module_index: int, hidden_states: torch.Tensor) -> None:
    parallel.tell(np.array([LOGITS, module_index, len(hidden_states)], dtype=np.int64))
    parallel.broadcast(hidden_states.contiguous())


def _receive_ints(sizes: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Token ids, positions and attention of a pass."""
    num_tokens, num_seqs, num_blocks, max_seqlen_q, max_context_len = sizes
    lengths = [num_tokens, num_tokens, num_seqs + 1, num_seqs, num_seqs * num_blocks, num_tokens]
    ints = parallel.broadcast(torch.empty(sum(lengths), dtype=torch.int64, device=device))
    token_ids, positions, cu_seqlens_q, context_lens, block_tables, slot_mapping = ints.split(lengths)
    attention = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q.int(),
        context_lens=context_lens.int(),
        block_tables=block_tables.view(num_seqs, num_blocks).int(),
        slot_mapping=slot_mapping,
        max_seqlen_q=max_seqlen_q,
        max_context_len=max_context_len,
    )
    return token_ids, positions, attention
