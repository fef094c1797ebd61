"""Truncation of a distribution to its most likely tokens: exactly so many, the lowest ids where logits tie."""

from collections.abc import Callable

import numpy as np
import torch

_NUCLEUS_GUESS = 256
"""Tokens looked at first for a nucleus; a row that needs more is sorted as a whole."""

_LARGEST_SELECTION = 1024
"""Tokens up to which a selection is quicker than a sort of the vocabulary."""


def on_rows(logits: torch.Tensor, rows: np.ndarray, change: Callable[[torch.Tensor], None]) -> None:
    """Changes the given rows in place; gathers them only where they are not all."""
    if len(rows) == len(logits):
        change(logits)
    elif len(rows):
        index = torch.from_numpy(rows).to(logits.device)
        part = logits[index]
        change(part)
        logits[index] = part


def truncate_to_top_k(
    logits: torch.Tensor,  # [num_rows, vocab_size] fp32
    top_k: torch.Tensor,  # [num_rows] int64, 1 to vocab_size
    largest_top_k: int,  # the largest of them, known to the host: the device need not be asked
) -> None:
    """Sets all but the `top_k` largest logits of each row to -inf, in place."""
    threshold = _descending(logits, largest_top_k).gather(1, top_k[:, None] - 1)
    _keep_largest(logits, threshold, top_k)


def truncate_to_top_p(
    logits: torch.Tensor,  # [num_rows, vocab_size] fp32
    top_p: torch.Tensor,  # [num_rows] float64, in (0, 1)
) -> None:
    """Sets all but each row's nucleus to -inf, in place: the fewest tokens whose probabilities reach `top_p`.

    Asks the device whether every nucleus lies among the likeliest few hundred tokens.
    """
    threshold, num_kept, found = _nucleus(logits, top_p, min(_NUCLEUS_GUESS, logits.shape[1]))
    if not bool(found.all()):
        wide = torch.nonzero(~found)[:, 0]
        threshold[wide], num_kept[wide], _ = _nucleus(logits[wide], top_p[wide], logits.shape[1])
    _keep_largest(logits, threshold, num_kept)


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Looks for the nuclei among the `count` likeliest tokens.

    Returns the last kept logit [num_rows, 1], the number kept [num_rows], and whether it was found [num_rows].
    """
    largest = _descending(logits, count)
    cumulative = (largest - logits.logsumexp(dim=-1, keepdim=True)).double().exp_().cumsum(dim=-1)
    below = cumulative < top_p[:, None]
    num_kept = below.sum(dim=-1).add_(1).clamp_(max=count)
    return largest.gather(1, num_kept[:, None] - 1), num_kept, ~below[:, -1]


def _keep_largest(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    threshold: torch.Tensor,  # [num_rows, 1]: the last logit to keep
    num_kept: torch.Tensor,  # [num_rows] int64
) -> None:
    logits.masked_fill_(logits < threshold, -torch.inf)
    surplus = (logits > -torch.inf).sum(dim=-1) > num_kept
    if bool(surplus.any()):
        rows = torch.nonzero(surplus)[:, 0]
        tied = logits[rows] == threshold[rows]
        room = num_kept[rows] - (logits[rows] > threshold[rows]).sum(dim=-1)
        logits[rows] = logits[rows].masked_fill(tied & (tied.cumsum(dim=-1) > room[:, None]), -torch.inf)


def _descending(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest logits of each row, largest first."""
    if count <= _LARGEST_SELECTION:
        return logits.topk(count, dim=-1).values
    if logits.device.type == "cpu":  # numpy sorts values alone, several times faster than torch with their indices
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1)[:, :count])
    return logits.sort(dim=-1, descending=True).values[:, :count]
