"""Logprobs of tokens, judged before any processing of the logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.batch import Batch
from app.engine.plan import TokenLogprobs
from app.engine.sequence_state import SequenceState

_ROWS_AT_ONCE = 64
"""Rows whose logits live at once: those of a whole prompt chunk would be larger than the model."""


def token_logprobs(
    logits: torch.Tensor,  # [num_rows, vocab_size], unprocessed
    token_ids: np.ndarray,  # [num_rows] int64: the token that each row was followed by
    num_top: int,  # most likely tokens to report beside it
) -> list[TokenLogprobs]:
    """Logprob and rank of each row's token. Equal logits share the better rank; in `top` the lower id comes first."""
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        entries += _some_rows(logits[rows].float(), token_ids[rows], min(num_top, logits.shape[1]))
    return entries


def _some_rows(logits: torch.Tensor, token_ids: np.ndarray, num_top: int) -> list[TokenLogprobs]:
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])
    ranks = (logits > chosen).sum(dim=-1).add_(1).tolist()
    logprobs = (chosen - normaliser)[:, 0].tolist()
    top_logits, top_token_ids = logits.topk(num_top, dim=-1)
    top_logprobs = (top_logits - normaliser).tolist()
    tops = [
        sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        for ids, values in zip(top_token_ids.tolist(), top_logprobs, strict=True)
    ]
    return [TokenLogprobs(*entry) for entry in zip(token_ids.tolist(), logprobs, ranks, tops, strict=True)]


@dataclass(frozen=True)
class PromptPiece:
    """Some of a batch's rows whose logits are wanted, and the prompt tokens that follow them."""

    index: int  # of the sequence in the batch
    rows: np.ndarray  # [n] int64
    token_ids: np.ndarray  # [n] int64


def prompt_pieces(state: SequenceState, batch: Batch) -> Iterator[PromptPiece]:
    """What a step that is not committed yet owes to requests for `prompt_logprobs`.

    Every rank must compute the logits of each piece, in this order.
    """
    for i, slot in enumerate(batch.slots.tolist()):
        params = state.sampling_params[slot]
        if params is None or params.prompt_logprobs is None:
            continue
        start = int(state.num_computed_tokens[slot])
        end = min(start + int(batch.num_new_tokens[i]), int(state.num_prompt_tokens[slot]) - 1)
        first_row = int(batch.cu_seqlens_q[i]) - start
        for position in range(start, end, _ROWS_AT_ONCE):
            positions = np.arange(position, min(position + _ROWS_AT_ONCE, end), dtype=np.int64)
            yield PromptPiece(i, first_row + positions, state.token_ids[slot, positions + 1])
