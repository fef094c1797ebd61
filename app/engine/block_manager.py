"""Who holds which KV block, and which blocks hold a known prefix."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from app.engine.sequence import Sequence

WITHDRAWN_SHARE = 0.01  # of the blocks that are hit, so many may be withdrawn in the long run


class BlockManager:
    """Blocks with reference counts, shared between sequences by chained digests of their tokens.

    `num_free + num_used == num_blocks` at all times: a block is free exactly while no sequence holds it.
    A free block keeps its content and its digest, and may be hit, until it is handed out anew; the one
    free longest goes first. Only full blocks of computed tokens that the sequence keeps are published, so
    a shared block is never written. All operations take time in proportion to the blocks they move.

    A drafter that looks ahead leaves in a block what depends on the `num_lookahead_tokens` after it; digests
    then cover those as well, so that a hit is one for the drafter too. The alternative, to compute the last block
    of every hit again, would lose a block a request; this loses only hits whose next tokens differ.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_lookahead_tokens: int = 0
    ) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_lookahead_tokens = num_lookahead_tokens
        self._num_references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # where the block is the published one of its digest
        self._published: dict[bytes, int] = {}  # digest: block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next to go first
        self._num_withdrawable = float(num_blocks)  # never more: once the whole pool, then a share of the hits

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold."""
        return self.num_used / self.num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def allocate(self, sequence: Sequence) -> bool:
        """Gives a sequence blocks for all its known tokens, cached ones first; False, and nothing, if too few are free.

        Sets `num_computed_tokens` to the tokens found in the cache. The last known token is never among
        them: its logits are needed.
        """
        assert not sequence.block_ids
        cached = self._cached_prefix(sequence)
        num_fresh = -(-sequence.num_tokens // self.block_size) - len(cached)
        num_revived = sum(self._num_references[block] == 0 for block in cached)
        if num_fresh + num_revived > len(self._free):
            return False
        for block in cached:
            if self._num_references[block] == 0:
                del self._free[block]
            self._num_references[block] += 1
        sequence.block_ids = cached + [self._take() for _ in range(num_fresh)]
        self._num_withdrawable = min(self._num_withdrawable + WITHDRAWN_SHARE * len(cached), self.num_blocks)
        sequence.num_computed_tokens = len(cached) * self.block_size
        sequence.num_published_blocks = len(cached)
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens that the sequence's blocks hold, with all that are free."""
        return (len(sequence.block_ids) + len(self._free)) * self.block_size

    def append(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends a sequence's blocks to hold `num_tokens`; False, and nothing, where too few are free."""
        num_fresh = -(-num_tokens // self.block_size) - len(sequence.block_ids)
        if num_fresh > len(self._free):
            return False
        for _ in range(num_fresh):
            sequence.block_ids.append(self._take())
        return True

    def register_computed(self, sequence: Sequence) -> None:
        """Publishes the full blocks of tokens that have been computed, and are the sequence's for good."""
        num_known = sequence.num_tokens - self.num_lookahead_tokens
        num_full = min(sequence.num_computed_tokens, num_known) // self.block_size
        if not self.enable_prefix_caching or num_full <= sequence.num_published_blocks:
            return
        for index in range(sequence.num_published_blocks, num_full):
            digest, block = self._digest(sequence, index), sequence.block_ids[index]
            # Of two blocks with the same content the earlier stays the published one; the other stays private.
            if digest not in self._published:
                assert self._digests[block] is None
                self._published[digest] = block
                self._digests[block] = digest
        sequence.num_published_blocks = num_full

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Unpublishes blocks, all or none: sequences that hold them go on, the next to want them computes them anew.

        Those who ask may never be content. So much is granted that the cache stays of use: all blocks once, then few.
        """
        published = [block for block in dict.fromkeys(block_ids) if self._digests[block] is not None]
        if len(published) > self._num_withdrawable:
            return
        self._num_withdrawable -= len(published)
        for block in published:
            self._unpublish(block)
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks from a sequence, which forgets what it had computed."""
        for block in reversed(sequence.block_ids):  # a prefix outlives what continues it
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0
            if self._num_references[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)  # nothing to hit: handed out first
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._unpublish(block)
        self._num_references[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._published[digest]
            self._digests[block] = None

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.enable_prefix_caching or sequence.prompt_logprobs is not None:
            return []  # prompt logprobs need the logits of every prompt token
        blocks = []
        for index in range((sequence.num_tokens - max(self.num_lookahead_tokens, 1)) // self.block_size):
            block = self._published.get(self._digest(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """Digest of a full block of known tokens, those it looks ahead to, and all before it."""
        digests, size = sequence.block_digests, self.block_size
        for i in range(len(digests), index + 1):
            end = (i + 1) * size + self.num_lookahead_tokens
            tokens = array("q", sequence.token_ids[i * size : end])
            assert len(tokens) == end - i * size
            parent = digests[-1] if digests else b""
            digests.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())
        return digests[index]
