"""Logprobs of tokens, judged before any processing of the logits."""

import numpy as np
import torch

from app.engine.plan import TokenLogprobs

_ROWS_AT_ONCE = 64
"""Rows whose fp32 copies live at once: a whole prompt chunk's would be larger than the model."""


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
