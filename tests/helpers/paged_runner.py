"""Runs a model on ragged batches over a fresh KV pool with shuffled blocks, without the engine."""

import numpy as np
import torch

from kernels.metadata import AttentionMetadata
from models.causal_lm import CausalLM


class PagedRunner:
    """Sequences are named by integers; each takes blocks, in random order, as it grows."""

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int = 64,
        block_size: int = 4,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = block_size
        self.free_blocks = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.block_tables: dict[int, list[int]] = {}
        self.context_lens: dict[int, int] = {}
        self.kv_layers = [
            # What was never stored must never be read: it would spread as NaN.
            tuple(
                torch.full((num_blocks, block_size, *shape), torch.nan, dtype=spec.dtype, device=device)
                for shape in spec.shapes
            )
            for spec in model.kv_specs()
        ]

    @torch.inference_mode()
    def step(
        self,
        new_tokens: dict[int, list[int]],  # by sequence, each with one token or more
    ) -> dict[int, torch.Tensor]:
        """One forward pass; logits [num_new_tokens, vocab_size] of each sequence."""
        starts = {seq: self.context_lens.get(seq, 0) for seq in new_tokens}
        positions = [np.arange(starts[seq], starts[seq] + len(tokens)) for seq, tokens in new_tokens.items()]
        slots = []
        for seq, seq_positions in zip(new_tokens, positions, strict=True):
            blocks = self.block_tables.setdefault(seq, [])
            self.context_lens[seq] = int(seq_positions[-1]) + 1
            while len(blocks) * self.block_size < self.context_lens[seq]:
                blocks.append(self.free_blocks.pop())
            slots.append(np.array(blocks)[seq_positions // self.block_size] * self.block_size)
            slots[-1] += seq_positions % self.block_size
        hidden_states = self.model(
            torch.tensor([token for tokens in new_tokens.values() for token in tokens], device=self.device),
            torch.from_numpy(np.concatenate(positions)).to(self.device),
            self.kv_layers,
            self._metadata(list(new_tokens), [len(tokens) for tokens in new_tokens.values()], np.concatenate(slots)),
        )
        logits = self.model.compute_logits(hidden_states)
        if not len(logits):  # another rank has them
            return dict.fromkeys(new_tokens, logits)
        return dict(zip(new_tokens, logits.split([len(tokens) for tokens in new_tokens.values()]), strict=True))

    def _metadata(self, seqs: list[int], num_rows: list[int], slot_mapping: np.ndarray) -> AttentionMetadata:
        context_lens = [self.context_lens[seq] for seq in seqs]
        max_blocks = -(-max(context_lens) // self.block_size)
        block_tables = torch.zeros((len(seqs), max_blocks), dtype=torch.int32)
        for row, seq in enumerate(seqs):
            block_tables[row, : len(self.block_tables[seq])] = torch.tensor(self.block_tables[seq])
        return AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *np.cumsum(num_rows)], dtype=torch.int32, device=self.device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=self.device),
            block_tables=block_tables.to(self.device),
            slot_mapping=torch.from_numpy(slot_mapping).to(self.device),
            max_seqlen_q=max(num_rows),
            max_context_len=max(context_lens),
        )


def whole_prompt_logits(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position of one sequence, computed in one pass: [len(token_ids), vocab_size]."""
    return PagedRunner(model, num_blocks=len(token_ids), block_size=4).step({0: token_ids})[0]
