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
COMPARED_AT_ONCE = 2048  # occurrences: a text that repeats one token has as many as it has tokens
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
    ends = occurrences(token_ids, slots, num_tokens)
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


def occurrences(
    token_ids: np.ndarray,  # [max_num_seqs, max_model_len] int64
    slots: np.ndarray,  # [num_seqs] int64
    num_tokens: np.ndarray,  # [num_seqs] int64
) -> np.ndarray:
    """Indices after earlier occurrences of each sequence's ending in itself, the most recent first; 0: none.

    int64 [num_seqs, MAX_OCCURRENCES]. They end with its last two tokens; where these are many, with as much more of it
    as leaves few.
    """
    ends = np.zeros((len(slots), MAX_OCCURRENCES), dtype=np.int64)
    magnitudes = np.frexp(num_tokens)[1]  # so that a short text is not searched as if it were as long as the longest
    for magnitude in np.unique(magnitudes[num_tokens > MIN_MATCH_LENGTH]):
        alike = np.flatnonzero(magnitudes == magnitude)
        ends[alike] = _occurrences_alike(token_ids, slots[alike], num_tokens[alike])
    return ends


def _occurrences_alike(token_ids: np.ndarray, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """The same of sequences of nearly one length, MIN_MATCH_LENGTH + 1 at least."""
    num_seqs, longest = len(slots), int(num_tokens.max())
    texts = token_ids[slots, :longest]
    rows = np.arange(num_seqs)
    is_last, is_before_last = (texts == texts[rows, num_tokens - i][:, None] for i in (1, 2))
    is_end = is_before_last[:, :-2] & is_last[:, 1:-1]
    is_end &= np.arange(2, longest) < num_tokens[:, None]
    owners, ends = np.nonzero(is_end)
    ends += 2
    crowded = np.bincount(owners, minlength=num_seqs) > MAX_OCCURRENCES
    if crowded.any():
        narrowed = crowded[owners]
        stays = ~narrowed
        stays[narrowed] = _longest_few(texts, num_tokens, owners[narrowed], ends[narrowed])
        owners, ends = owners[stays], ends[stays]
    ranks = np.searchsorted(owners, owners, side="right") - 1 - np.arange(len(owners))  # 0: the most recent
    is_recent = ranks < MAX_OCCURRENCES
    found = np.zeros((num_seqs, MAX_OCCURRENCES), dtype=np.int64)
    found[owners[is_recent], ranks[is_recent]] = ends[is_recent]
    return found


def _longest_few(texts: np.ndarray, num_tokens: np.ndarray, owners: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of many occurrences of a sequence's last two tokens those that share most with it; bool [num_ends].

    As many tokens count as leave no more than MAX_OCCURRENCES, or one less where that leaves none.
    """
    distances = np.arange(MIN_MATCH_LENGTH + 1, MAX_MATCH_LENGTH + 1)
    ending = texts[np.arange(len(texts))[:, None], np.maximum(num_tokens[:, None] - distances, 0)]
    lengths = np.empty_like(ends)
    for start in range(0, len(ends), COMPARED_AT_ONCE):
        some = slice(start, start + COMPARED_AT_ONCE)
        index = ends[some, None] - distances
        same = (texts[owners[some, None], np.maximum(index, 0)] == ending[owners[some]]) & (index >= 0)
        lengths[some] = MIN_MATCH_LENGTH + np.logical_and.accumulate(same, axis=1).sum(axis=1)
    num_lengths = MAX_MATCH_LENGTH + 2
    histogram = np.bincount(owners * num_lengths + lengths, minlength=len(texts) * num_lengths)
    num_as_long = histogram.reshape(-1, num_lengths)[:, ::-1].cumsum(axis=1)[:, ::-1]
    least = (num_as_long <= MAX_OCCURRENCES).argmax(axis=1)
    least -= num_as_long[np.arange(len(texts)), least] == 0
    return lengths >= least[owners]


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
    most_votes = int(votes.sum(axis=1).max(initial=1))
    if most_votes < votes.shape[1]:  # those without a vote go: what follows sets each beside all others
        order = np.argsort(~votes, axis=1, kind="stable")[:, :most_votes]
        votes = np.take_along_axis(votes, order, axis=1)
        after = np.take_along_axis(after, order[:, :, None], axis=1)
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
