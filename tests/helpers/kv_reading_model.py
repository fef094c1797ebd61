"""A language model whose next token depends on every token before it, read back from its own KV pool."""

import torch

from kernels.metadata import AttentionMetadata
from models.kv_spec import LayerKVSpec

CANARY = -1
PRIME = 10_007


class KVReadingModel:
    """Stores token ids where others store keys; the hidden state is a hash of all of them up to the row.

    KV that is stale, shifted or another sequence's changes the logits; KV that was never written is an assertion.
    Two models with the same `noise` agree; a larger one disagrees more often.
    """

    def __init__(self, vocab_size: int, noise: float = 0.0, max_num_rows: int = 10**9) -> None:
        self.vocab_size = vocab_size
        self.max_num_rows = max_num_rows
        self.passes: list[int] = []  # rows of each
        self.broken_at: set[int] = set()  # hidden states whose logits are NaN
        self._noise = noise
        self._phases = torch.arange(1, vocab_size + 1, dtype=torch.float64)

    def kv_specs(self) -> list[LayerKVSpec]:
        return [LayerKVSpec(((1,),), torch.int64)]

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_layers: list[tuple[torch.Tensor, ...]],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        assert 0 < len(token_ids) <= self.max_num_rows
        assert ((token_ids >= 0) & (token_ids < self.vocab_size)).all(), "an id that the model does not have"
        self.passes.append(len(token_ids))
        (pool,) = kv_layers[0]
        pool.view(-1)[attention.slot_mapping] = token_ids
        hidden_states = torch.empty(len(token_ids), 1, dtype=torch.int64)
        for seq, context_len in enumerate(attention.context_lens.tolist()):
            rows = slice(*attention.cu_seqlens_q[seq : seq + 2].tolist())
            context = pool[attention.block_tables[seq].long()].view(-1)[:context_len]
            assert (context != CANARY).all(), "KV that was never written"
            weights = torch.arange(3, 3 + context_len).pow(3) % PRIME
            hashes = (context.add(1) * weights).cumsum(0) % PRIME
            assert torch.equal(positions[rows], torch.arange(context_len)[-(rows.stop - rows.start) :])
            hidden_states[rows, 0] = hashes[positions[rows]]
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hashes = hidden_states.double()
        logits = 4 * torch.cos(hashes * self._phases) + self._noise * torch.sin(hashes * self._phases * 1.7)
        logits[[hidden in self.broken_at for hidden in hidden_states[:, 0].tolist()]] = torch.nan
        return logits.float()
