"""Truncation of a distribution to its most likely tokens: exactly so many, the lowest ids where logits tie."""

from collections.abc import Callable

import numpy as np
import torch

_FIRST_LOOK = 256
"""Tokens looked at first for a nucleus: most need fewer, and the whole vocabulary need not be sorted."""

_NUM_GROUPS = 1024
"""Groups of tokens whose largest logits tell which tokens may be among the first."""

_LOWEST = np.finfo(np.float32).min


def on_rows(logits: torch.Tensor, rows: np.ndarray, change: Callable[[torch.Tensor], None]) -> None:
    """Changes the given rows in place; gathers them only where they are not all."""
    if len(rows) == len(logits):
        change(logits)
    elif len(rows):
        index = torch.from_numpy(rows).to(logits.device)
        part = logits.index_select(0, index)
        change(part)
        logits.index_copy_(0, index, part)


def truncate(
    logits: torch.Tensor,  # [num_rows, vocab_size] fp32; each row's largest is 0, or all are NaN
    top_k: np.ndarray,  # [num_rows] int64; 0 is off
    top_p: np.ndarray,  # [num_rows] float64; 1 is off
) -> None:
    """Sets all but the `top_k` largest logits of each row to -inf, then all but the nucleus of what is left; in place.

    The nucleus is the fewest tokens whose probabilities reach `top_p`.
    """
    if logits.device.type == "cpu":
        for row, k, p in zip(logits.numpy(), top_k.tolist(), top_p.tolist(), strict=True):
            _truncate_row(row, k, p)
    else:
        truncate_by_sorting(logits, top_k, top_p)


def truncate_by_sorting(logits: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> None:
    """`truncate` in a few operations over all rows, which suit an accelerator; a sort keeps equal logits in order."""
    vocab_size = logits.shape[1]
    num_kept = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)).to(logits.device)
    descending, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    dropped = torch.arange(vocab_size, device=logits.device) >= num_kept[:, None]
    cumulative = descending.masked_fill(dropped, -torch.inf).double().softmax(dim=-1).cumsum(dim=-1)
    limit = torch.from_numpy(top_p).to(logits.device)[:, None]
    dropped[:, 1:] |= (cumulative[:, :-1] >= limit) & (limit < 1)
    logits.scatter_(1, token_ids, descending.masked_fill_(dropped, -torch.inf))


def _truncate_row(row: np.ndarray, top_k: int, top_p: float) -> None:
    """`truncate` of one row, which stays in the processor's cache throughout."""
    limited = 0 < top_k < len(row)
    if row.max() != 0 or not (limited or top_p < 1):  # NaN: there was no largest logit, and there is nothing to keep
        return
    if limited:
        token_ids = _candidates(row, top_k)
        descending = -np.sort(-row[token_ids])[:top_k]
        cumulative = np.exp(descending).cumsum(dtype=np.float64)
        wanted = top_p * cumulative[-1]
    else:
        weights = np.exp(row)
        wanted = top_p * weights.sum(dtype=np.float64)
        token_ids = _candidates(row, min(_FIRST_LOOK, len(row)))
        if weights[token_ids].sum(dtype=np.float64) < wanted:
            # All tokens below this bound together do not make up what a nucleus may leave out.
            token_ids = np.flatnonzero(weights >= (1 / top_p - 1) * wanted / len(row))
        descending = -np.sort(-row[token_ids])
        cumulative = np.exp(descending).cumsum(dtype=np.float64)
    num_kept = len(descending)
    if top_p < 1:
        num_kept = min(int(np.searchsorted(cumulative, wanted)) + 1, num_kept)
    logits = row[token_ids]
    kept = logits > descending[num_kept - 1]
    tied = np.flatnonzero(logits == descending[num_kept - 1])  # candidates come by id: the lowest first
    kept[tied[: num_kept - np.count_nonzero(kept)]] = True
    row.fill(-np.inf)
    row[token_ids[kept]] = logits[kept]


def _candidates(row: np.ndarray, count: int) -> np.ndarray:
    """Ids, ascending, of all tokens whose logits reach one that at least `count` reach; without those masked before.

    The largest logits of groups are logits themselves: `count` tokens reach the `count`-th largest of them.
    """
    if 2 * count > _NUM_GROUPS or len(row) < 4 * _NUM_GROUPS:
        threshold = np.partition(row, len(row) - count)[len(row) - count]
    else:
        whole = len(row) - len(row) % _NUM_GROUPS
        largest = row[:whole].reshape(-1, _NUM_GROUPS).max(axis=0)
        threshold = np.partition(largest, _NUM_GROUPS - count)[_NUM_GROUPS - count]
    return np.flatnonzero(row >= max(threshold, _LOWEST))
