"""Suffix decoding: what followed the longest earlier occurrence of a sequence's ending (arXiv 2411.04975).

The paper counts occurrences in a suffix tree. Here a sequence is searched as it stands in the worker's
state, a few vectorised lines over its tokens, so that nothing has to be kept in step with admissions and
preemptions; only past answers, where they are remembered, have an index of their own.
"""

from dataclasses import dataclass

import numpy as np

MAX_MATCH_LENGTH = 24  # tokens compared behind an occurrence; longer matches tell no more
MAX_OCCURRENCES = 8  # most recent ones of the longest match that vote on a continuation
MIN_MATCH_LENGTH = 2
NO_TOKEN = -1  # where a text has none
NO_ENDING = -2  # where a sequence has none: equals nothing in a text


@dataclass(frozen=True)
class Continuations:
    """Draft tokens of several sequences, with what they rest on."""

    token_ids: np.ndarray  # [num_seqs, k] int64; entries past num_tokens are not read
    num_tokens: np.ndarray  # [num_seqs] int64
    match_lengths: np.ndarray  # [num_seqs] int64: tokens agreed on before the first draft
    unanimous: np.ndarray  # [num_seqs, k] bool: all occurrences that said the same so far go on so

    @staticmethod
    def none(num_seqs: int, width: int) -> "Continuations":
        shape = (num_seqs, width)
        num_tokens, match_lengths = np.zeros((2, num_seqs), dtype=np.int64)
        return Continuations(np.zeros(shape, dtype=np.int64), num_tokens, match_lengths, np.zeros(shape, dtype=bool))


def endings(token_ids: np.ndarray, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Last tokens of the sequences at `slots` of `token_ids` [max_num_seqs, max_model_len], the last one first.

    int64 [num_seqs, MAX_MATCH_LENGTH], NO_ENDING before the beginning.
    """
    index = num_tokens[:, None] - np.arange(1, MAX_MATCH_LENGTH + 1)
    return np.where(index >= 0, token_ids[slots[:, None], np.maximum(index, 0)], NO_ENDING)


def continue_sequences(
    token_ids: np.ndarray,  # [max_num_seqs, max_model_len] int64
    slots: np.ndarray,  # [num_seqs] int64: sequences looked up in themselves
    num_tokens: np.ndarray,  # [num_seqs] int64
    width: int,  # drafts wanted, at most
) -> Continuations:
    """What followed the longest earlier occurrence of each sequence's ending within the sequence."""
    ends = np.zeros((len(slots), MAX_OCCURRENCES), dtype=np.int64)  # 0: none
    for i, (slot, num) in enumerate(zip(slots.tolist(), num_tokens.tolist(), strict=True)):
        found = occurrences(token_ids[slot, :num])
        ends[i, : len(found)] = found
    if not ends.any():
        return Continuations.none(len(slots), width)
    before = ends[:, :, None] - np.arange(1, MAX_MATCH_LENGTH + 1)
    after = ends[:, :, None] + np.arange(width)
    rows = slots[:, None, None]
    is_known = (after < num_tokens[:, None, None]) & (ends > 0)[:, :, None]
    return continue_matches(
        endings(token_ids, slots, num_tokens),
        np.where(before >= 0, token_ids[rows, np.maximum(before, 0)], NO_TOKEN),
        np.where(is_known, token_ids[rows, np.minimum(after, token_ids.shape[1] - 1)], NO_TOKEN),
        MIN_MATCH_LENGTH,
    )


def occurrences(text: np.ndarray) -> np.ndarray:
    """Indices after earlier occurrences of the ending of `text` [n], int64, the most recent first.

    They end with its last two tokens; where these are many, with as much more of it as leaves few.
    """
    if len(text) < MIN_MATCH_LENGTH + 1:
        return np.zeros(0, dtype=np.int64)
    ends = np.flatnonzero((text[1:-1] == text[-1]) & (text[:-2] == text[-2])) + 2
    for length in range(MIN_MATCH_LENGTH + 1, MAX_MATCH_LENGTH + 1):
        if len(ends) <= MAX_OCCURRENCES:
            break
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[-length]]
        if not len(longer):
            break
        ends = longer
    return ends[: -MAX_OCCURRENCES - 1 : -1]


def continue_matches(
    suffixes: np.ndarray,  # [num_seqs, MAX_MATCH_LENGTH] int64: endings, the last token first
    before: np.ndarray,  # [num_seqs, num_occurrences, MAX_MATCH_LENGTH] int64: the same of each occurrence
    after: np.ndarray,  # [num_seqs, num_occurrences, k] int64: what followed it; NO_TOKEN from its end on
    min_length: int,  # of a match, in tokens
) -> Continuations:
    """Of each sequence's longest matches the one that the others agree with for longest, in all.

    Occurrences come with the most recent first, which wins a tie.
    """
    lengths = np.logical_and.accumulate(before == suffixes[:, None], axis=2).sum(axis=2)
    longest = lengths.max(axis=1, initial=0)
    votes = (lengths == longest[:, None]) & (longest >= min_length)[:, None]
    is_token = (after != NO_TOKEN) & votes[:, :, None]
    said, others_said = np.where(is_token, after, NO_TOKEN), np.where(is_token, after, NO_ENDING)
    same = said[:, :, None] == others_said[:, None]
    together = np.logical_and.accumulate(same, axis=3)  # [num_seqs, num_occurrences, its others, k]
    chosen = together.sum(axis=(2, 3)).argmax(axis=1)
    rows = np.arange(len(suffixes))
    agreeing = together[rows, chosen]  # [num_seqs, num_occurrences, k]
    agreed = np.concatenate([votes[:, :, None], agreeing[:, :, :-1]], axis=2)
    dissents = (agreed & is_token & ~agreeing).any(axis=1)
    num_tokens = is_token[rows, chosen].sum(axis=1)
    return Continuations(after[rows, chosen], num_tokens, longest, ~dissents)
