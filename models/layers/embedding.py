"""Token embedding and output head, shared out among tensor-parallel ranks by rows of the vocabulary."""

import torch
from torch import nn

from kernels import ops
from kernels.packed_weight import Weight
from models import parallel
from models.layers.parameter import Shard, UnloadedParameter


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding matrix; a rank contributes zeros for tokens that are not its own."""

    weight: Weight  # [vocab_size / tp_size, hidden_size]

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, is_head: bool) -> None:
        super().__init__()
        self.weight = _vocab_parameter(vocab_size, hidden_size, dtype, packed=is_head)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if parallel.tp_size() == 1:
            return ops.embedding(token_ids, self.weight)
        num_rows = self.weight.shape[0]
        rows = token_ids - parallel.tp_rank() * num_rows
        owned = (rows >= 0) & (rows < num_rows)
        embedded = ops.embedding(rows.clamp(0, num_rows - 1), self.weight)
        return parallel.all_reduce(embedded.masked_fill(~owned[:, None], 0))


class ParallelLMHead(nn.Module):
    """The output matrix of a model that does not tie it to the embedding."""

    weight: Weight  # [vocab_size / tp_size, hidden_size]

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _vocab_parameter(vocab_size, hidden_size, dtype, packed=True)


def vocab_logits(
    hidden_states: torch.Tensor,  # [num_rows, hidden_size]
    weight: Weight,  # [vocab_size / tp_size, hidden_size]
) -> torch.Tensor:
    """fp32 [num_rows, vocab_size] on rank 0, which alone decides; no rows elsewhere."""
    return parallel.gather(ops.linear(hidden_states, weight, out_dtype=torch.float32))


def _vocab_parameter(vocab_size: int, hidden_size: int, dtype: torch.dtype, packed: bool) -> UnloadedParameter:
    num_rows = parallel.share(vocab_size, "vocab_size")
    shard = Shard.of_rows((vocab_size, hidden_size), parallel.tp_rank() * num_rows, num_rows)
    return UnloadedParameter((num_rows, hidden_size), dtype, (shard,), packed)
