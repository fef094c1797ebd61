"""Past answers of this process, looked up by the ending of a sequence, within a number of bytes."""

import numpy as np

from app.speculative.suffix import MAX_MATCH_LENGTH, NO_TOKEN, Continuations, continue_matches

GRAM_LENGTHS = (12, 3)  # endings that are indexed, in tokens; the longer is tried first
NUM_CANDIDATES = 4  # most recent occurrences that are compared: a step looks up every sequence, and has little time
MULTIPLIERS = np.random.default_rng(0).integers(1, 2**63, 1 + max(GRAM_LENGTHS), dtype=np.uint64) * 2 + 1  # odd
TOKEN_BYTES = 4 + 8 + len(GRAM_LENGTHS) * (4 + 4)


class AnswerMemory:
    """A ring of tokens, the oldest written over first; chains lead from each gram to where it was before.

    Every token carries the owner of its answer, an answer ends with NO_TOKEN, and whatever the chains lead to is
    compared token by token before it counts. So chains may break or go astray where the ring was written over,
    and no owner ever reads what another wrote. Owners are part of the hash: nobody's answers lengthen
    another's chains.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.capacity = memory_bytes // TOKEN_BYTES
        assert self.capacity > 2 * MAX_MATCH_LENGTH
        self._token_ids = np.empty(self.capacity, dtype=np.int32)
        self._owners = np.empty(self.capacity, dtype=np.int64)
        # Ring indices after a gram: its last occurrence, by hash, and the one before each. 0 where there is none.
        self._heads = np.empty((len(GRAM_LENGTHS), self.capacity), dtype=np.int32)
        self._previous = np.empty((len(GRAM_LENGTHS), self.capacity), dtype=np.int32)
        self.clear()

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._token_ids, self._owners, self._heads, self._previous))

    def clear(self) -> None:
        self._token_ids.fill(NO_TOKEN)
        self._owners.fill(0)
        self._heads.fill(0)
        self._previous.fill(0)
        self._next = 0  # ring index that is written next

    def remember(self, token_ids: np.ndarray, num_prompt_tokens: int, owner: int) -> None:
        """An answer, with the end of its prompt, by which its beginning is found. `token_ids` [n] holds both.

        Of an answer longer than half the ring the last part is kept.
        """
        if len(token_ids) == num_prompt_tokens:
            return
        start = max(num_prompt_tokens - MAX_MATCH_LENGTH, len(token_ids) - self.capacity // 2, 0)
        text = token_ids[start:]
        index = (self._next + np.arange(len(text))) % self.capacity
        self._next = int((index[-1] + 2) % self.capacity)
        self._token_ids[index] = text
        self._token_ids[index[-1] + 1 - self.capacity] = NO_TOKEN
        self._owners[index] = owner
        for level, length in enumerate(GRAM_LENGTHS):
            if len(text) > length:
                windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)[:, ::-1]
                self._link(level, self._buckets(windows, np.full(len(windows), owner)), index[length:])

    def look_up(
        self,
        suffixes: np.ndarray,  # [num_seqs, MAX_MATCH_LENGTH] int64: endings, the last token first
        owners: np.ndarray,  # [num_seqs] int64: whose answers each may see
        width: int,  # drafts wanted, at most
    ) -> Continuations:
        """What followed the longest occurrence of each ending in its owner's answers."""
        ends, is_found = self._candidates(0, suffixes, owners)
        for level in range(1, len(GRAM_LENGTHS)):
            rest = np.flatnonzero(~is_found.any(axis=1))
            if len(rest):
                ends[rest], is_found[rest] = self._candidates(level, suffixes[rest], owners[rest])
        if not is_found.any():
            return Continuations.none(len(suffixes), width)
        before = self._before(ends, MAX_MATCH_LENGTH)
        before[~is_found] = NO_TOKEN
        after = self._token_ids[(ends[:, :, None] + np.arange(width)) % self.capacity].astype(np.int64)
        after[np.logical_or.accumulate(after == NO_TOKEN, axis=2)] = NO_TOKEN
        return continue_matches(suffixes, before, after, GRAM_LENGTHS[-1])

    def _link(self, level: int, buckets: np.ndarray, ends: np.ndarray) -> None:
        """Puts `ends` [n], ring indices in the order of writing, before what their buckets [n] lead to."""
        order = np.argsort(buckets, kind="stable")
        buckets, ends = buckets[order], ends[order]
        is_first = np.append(True, buckets[1:] != buckets[:-1])
        earlier = np.roll(ends, 1)
        earlier[is_first] = self._heads[level, buckets[is_first]]
        self._previous[level, ends] = earlier
        is_last = np.append(is_first[1:], True)
        self._heads[level, buckets[is_last]] = ends[is_last]

    def _candidates(self, level: int, suffixes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ring indices after occurrences of each ending's gram, the most recent first, and which of them are any.

        Both [num_seqs, NUM_CANDIDATES].
        """
        length = GRAM_LENGTHS[level]
        ends = np.empty((len(suffixes), NUM_CANDIDATES), dtype=np.int64)
        ends[:, 0] = self._heads[level, self._buckets(suffixes[:, :length], owners)]
        for i in range(1, NUM_CANDIDATES):
            ends[:, i] = self._previous[level, ends[:, i - 1]]
        # A chain leads back in time until it has no more, or its next link was written over.
        age = (self._next - 1 - ends) % self.capacity
        goes_back = np.concatenate([np.ones((len(ends), 1), dtype=bool), age[:, 1:] > age[:, :-1]], axis=1)
        is_found = np.logical_and.accumulate(goes_back, axis=1)
        is_found &= self._owners[ends - 1] == owners[:, None]
        is_found &= (self._before(ends, length) == suffixes[:, None, :length]).all(axis=2)
        return ends, is_found

    def _before(self, ends: np.ndarray, length: int) -> np.ndarray:
        """Tokens before ring indices `ends` [num_seqs, n], the last first; int64 [num_seqs, n, length]."""
        # Negative indices count from the ring's end, as they should.
        return self._token_ids[ends[:, :, None] - np.arange(1, length + 1)].astype(np.int64)

    def _buckets(self, grams: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Hash of grams [n, length], the last token first, and their owners [n]; int64 [n] below the capacity."""
        length = grams.shape[1]
        key = (grams.astype(np.uint64) * MULTIPLIERS[:length]).sum(axis=1) + owners.astype(np.uint64) * MULTIPLIERS[-1]
        key ^= key >> np.uint64(29)  # the product's high bits are the mixed ones
        return (key % np.uint64(self.capacity)).astype(np.int64)
