"""Suffix decoding: what followed the longest earlier occurrence of the sequence's suffix (arXiv 2411.04975).

The paper counts occurrences in a suffix tree. Here a sequence is searched as it stands in the worker's
state, a few vectorised lines over its tokens, so that nothing has to be kept in step with admissions and
preemptions; only past answers, where they are remembered, have an index of their own.
"""

from dataclasses import dataclass

import numpy as np

MAX_MATCH_LENGTH = 24  # tokens compared behind an occurrence; longer matches tell no more
MAX_OCCURRENCES = 64  # most recent ones that vote on a continuation
MIN_MATCH_LENGTH = 2


@dataclass(frozen=True)
class Continuation:
    """Draft tokens with what they rest on."""

    token_ids: np.ndarray  # [num_tokens] int64
    match_lengths: np.ndarray  # [num_tokens] int64: tokens agreed on before each draft, earlier drafts included
    shares: np.ndarray  # [num_tokens] fp64: share of the remaining occurrences that continue so

    def first(self, num: int) -> "Continuation":
        return Continuation(self.token_ids[:num], self.match_lengths[:num], self.shares[:num])


NOTHING = Continuation(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))


def continue_suffix(
    text: np.ndarray,  # [n] int64: where occurrences are searched
    ends: np.ndarray,  # [num_occurrences] int64, ascending: index after each occurrence, 2 <= end < n
    suffix: np.ndarray,  # [m] int64, m >= 2; every occurrence ends with its last two tokens
    num_tokens: int,  # drafts wanted, at most
) -> Continuation:
    """What follows the longest matches of `suffix`, token by token by majority; ties go to the most recent."""
    ends = ends[-MAX_OCCURRENCES:]
    lengths = match_lengths(text, ends, suffix)
    longest = int(lengths.max())
    ends = ends[lengths == longest]
    if len(ends) == 1:
        token_ids = text[ends[0] : ends[0] + num_tokens]
        return Continuation(token_ids, longest + np.arange(len(token_ids)), np.ones(len(token_ids)))
    drafted: list[int] = []
    shares: list[float] = []
    for offset in range(num_tokens):
        ends = ends[ends + offset < len(text)]
        if not len(ends):
            break
        following = text[ends + offset]
        # The most recent occurrence comes first, so that the arg-max of the counts prefers it in a tie.
        candidates, first_seen, counts = np.unique(following[::-1], return_index=True, return_counts=True)
        best = np.lexsort((first_seen, -counts))[0]
        drafted.append(candidates[best])
        shares.append(counts[best] / len(ends))
        ends = ends[following == candidates[best]]
    return Continuation(np.array(drafted, dtype=np.int64), longest + np.arange(len(drafted)), np.array(shares))


def occurrences(text: np.ndarray) -> np.ndarray:
    """Indices after each earlier occurrence of the last two tokens of `text` [n]; ascending int64."""
    if len(text) < MIN_MATCH_LENGTH + 1:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero((text[1:-1] == text[-1]) & (text[:-2] == text[-2])) + 2


def match_lengths(text: np.ndarray, ends: np.ndarray, suffix: np.ndarray) -> np.ndarray:
    """Tokens before each end that agree with `suffix`, at most MAX_MATCH_LENGTH; int64 [num_occurrences]."""
    back = np.arange(1, min(MAX_MATCH_LENGTH, len(suffix)) + 1)
    index = ends[:, None] - back
    agrees = (text[np.maximum(index, 0)] == suffix[len(suffix) - back]) & (index >= 0)
    return np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
