"""Blocks are never lost, never written by two, and a cache hit finds what its tokens say."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.engine.block_manager import BlockManager
from app.engine.run_scanner import RunScanner
from app.engine.sampling_params import SamplingParams
from app.engine.sequence import Sequence
from tests.helpers.scripted_worker import prefix_hashes

BLOCK_SIZE = 4


def make_sequence(token_ids: list[int], **params) -> Sequence:
    sampling_params = SamplingParams(**params)
    return Sequence(
        request_id="request",
        index=0,
        prompt_token_ids=token_ids,
        sampling_params=sampling_params,
        eos_token_ids=(),
        scanner=RunScanner(None, sampling_params, (), token_ids, 10_000),
    )


def compute_all_but_last(manager: BlockManager, sequence: Sequence) -> None:
    sequence.num_computed_tokens = sequence.num_tokens - 1
    manager.register_computed(sequence)


def run_through(manager: BlockManager, token_ids: list[int]) -> Sequence:
    sequence = make_sequence(token_ids)
    assert manager.allocate(sequence)
    compute_all_but_last(manager, sequence)
    manager.free(sequence)
    return sequence


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 12)]
)
def test_a_hit_covers_full_blocks_and_leaves_the_last_token(num_tokens, num_cached):
    manager = BlockManager(32, BLOCK_SIZE, True)
    run_through(manager, list(range(15)))
    sequence = make_sequence(list(range(num_tokens)))
    assert manager.allocate(sequence)
    assert sequence.num_computed_tokens == num_cached
    assert len(sequence.block_ids) == -(-num_tokens // BLOCK_SIZE)


def test_a_block_counts_with_all_that_stands_before_it():
    manager = BlockManager(32, BLOCK_SIZE, True)
    run_through(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = make_sequence([9, 9, 9, 9, 5, 6, 7, 8, 9])
    assert manager.allocate(other)
    assert other.num_computed_tokens == 0


def test_without_caching_nothing_is_found():
    manager = BlockManager(32, BLOCK_SIZE, False)
    run_through(manager, list(range(15)))
    sequence = make_sequence(list(range(15)))
    assert manager.allocate(sequence)
    assert sequence.num_computed_tokens == 0


def test_prompt_logprobs_pass_the_cache_by():
    manager = BlockManager(32, BLOCK_SIZE, True)
    run_through(manager, list(range(15)))
    sequence = make_sequence(list(range(15)), prompt_logprobs=0)
    assert manager.allocate(sequence)
    assert sequence.num_computed_tokens == 0


def test_tokens_that_were_not_computed_or_not_kept_are_not_published():
    manager = BlockManager(32, BLOCK_SIZE, True)
    sequence = make_sequence(list(range(9)))
    assert manager.allocate(sequence)
    sequence.num_computed_tokens = 7
    manager.register_computed(sequence)
    again = make_sequence(list(range(9)))
    assert manager.allocate(again)
    assert again.num_computed_tokens == 4


def test_two_that_computed_the_same_share_it_later_and_lose_nothing():
    manager = BlockManager(8, BLOCK_SIZE, True)
    first, second = make_sequence(list(range(9))), make_sequence(list(range(9)))
    for sequence in (first, second):
        assert manager.allocate(sequence)
    for sequence in (first, second):
        compute_all_but_last(manager, sequence)
    assert not set(first.block_ids) & set(second.block_ids)
    third = make_sequence(list(range(9)))
    assert manager.allocate(third)
    assert third.block_ids[:2] == first.block_ids[:2]
    for sequence in (first, second, third):
        manager.free(sequence)
    assert manager.num_free == 8
    last = make_sequence([7] * 32)
    assert manager.allocate(last)
    assert sorted(last.block_ids) == list(range(8))


def test_the_block_free_longest_is_handed_out_first_and_a_prefix_outlives_its_end():
    manager = BlockManager(6, BLOCK_SIZE, True)
    old, new = [1] * 9, [2] * 9
    run_through(manager, old)
    run_through(manager, new)
    taker = make_sequence([3] * 12)
    assert manager.allocate(taker)  # two blocks that hold nothing, and the end of the old prefix
    manager.free(taker)
    for tokens, num_cached in ((new, 8), (old, 4)):
        sequence = make_sequence(tokens)
        assert manager.allocate(sequence)
        assert sequence.num_computed_tokens == num_cached
        manager.free(sequence)


def test_a_refusal_changes_nothing():
    manager = BlockManager(4, BLOCK_SIZE, True)
    run_through(manager, list(range(9)))
    holder = make_sequence([50] * 5)
    assert manager.allocate(holder)
    sequence = make_sequence(list(range(9)) + [9] * 8)  # two of its five blocks are cached
    assert not manager.allocate(sequence)
    assert (sequence.block_ids, sequence.num_computed_tokens, manager.num_free) == ([], 0, 2)
    assert not manager.append(holder, 100)
    assert (len(holder.block_ids), manager.num_used) == (2, 2)
    assert manager.usage == 0.5


def test_what_is_withdrawn_stays_in_use_and_is_computed_anew():
    manager = BlockManager(8, BLOCK_SIZE, True)
    run_through(manager, list(range(13)))
    holder = make_sequence(list(range(9)))
    assert manager.allocate(holder)
    assert holder.num_computed_tokens == 8
    manager.withdraw(holder.block_ids[:1] * 2)
    again = make_sequence(list(range(9)))
    assert manager.allocate(again)
    assert again.num_computed_tokens == 0
    assert not set(again.block_ids) & set(holder.block_ids)
    compute_all_but_last(manager, again)
    for sequence in (holder, again):
        manager.free(sequence)
    third = make_sequence(list(range(13)))
    assert manager.allocate(third)
    assert third.num_computed_tokens == 12, "the rest of the prefix is still known"


def test_all_blocks_may_be_withdrawn_once_and_a_share_of_the_hits_later():
    manager = BlockManager(8, BLOCK_SIZE, True)
    num_hit = []
    for _ in range(1000):
        sequence = make_sequence(list(range(9)))
        assert manager.allocate(sequence)
        num_hit.append(sequence.num_computed_tokens)
        compute_all_but_last(manager, sequence)
        if num_hit[-1]:
            manager.withdraw(sequence.block_ids)
        manager.free(sequence)
    assert num_hit[:8] == [0, 8] * 4
    assert 4 < num_hit.count(0) <= 4 + 10 + 1


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests that come, draft, stop, are preempted and go, over a pool that is too small for all."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.content: dict[tuple[int, int], int] = {}  # (block, offset): hash of the tokens up to it

    @initialize(num_blocks=st.integers(4, 24), caching=st.booleans())
    def build(self, num_blocks: int, caching: bool) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, caching)

    @rule(family=st.integers(0, 2), num_common=st.integers(0, 20), own=st.lists(st.integers(0, 1), max_size=6))
    def arrive(self, family: int, num_common: int, own: list[int]) -> None:
        token_ids = [family * 10 + i % 7 for i in range(num_common)] + own
        if token_ids and -(-len(token_ids) // BLOCK_SIZE) <= self.manager.num_blocks:
            self.waiting.append(make_sequence(token_ids))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.waiting))
        num_free = self.manager.num_free
        if not self.manager.allocate(sequence):
            assert self.manager.num_free == num_free < -(-sequence.num_tokens // BLOCK_SIZE)
            return
        self.waiting.remove(sequence)
        self.running.append(sequence)
        assert sequence.num_computed_tokens < sequence.num_tokens
        hashes = prefix_hashes(sequence.token_ids)
        for position in range(sequence.num_computed_tokens):
            assert self.content[self.place(sequence, position)] == hashes[position]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_drafts=st.integers(0, 6), num_accepted=st.integers(0, 6), num_kept=st.integers(1, 7))
    def step(self, data: st.DataObject, num_drafts: int, num_accepted: int, num_kept: int) -> None:
        """Computes a chunk, or the known tokens and drafts; some are accepted, fewer kept where a stop cuts the run."""
        sequence = data.draw(st.sampled_from(self.running))
        num_known = sequence.num_tokens - sequence.num_computed_tokens
        num_new = data.draw(st.integers(1, num_known))
        if num_new < num_known:
            self.write(sequence, sequence.token_ids, sequence.num_computed_tokens + num_new)
            sequence.num_computed_tokens += num_new
            self.manager.register_computed(sequence)
            return
        drafts = data.draw(st.lists(st.integers(0, 1), min_size=num_drafts, max_size=num_drafts))
        num_blocks = len(sequence.block_ids)
        if not self.manager.append(sequence, sequence.num_tokens + num_drafts):
            assert len(sequence.block_ids) == num_blocks
            return
        self.write(sequence, sequence.token_ids + drafts, sequence.num_tokens + num_drafts)
        emitted = [*drafts[: min(num_accepted, num_drafts)], 1]
        kept = emitted[:num_kept]
        sequence.num_computed_tokens = sequence.num_tokens + min(len(kept), len(emitted) - 1)
        sequence.token_ids += kept
        self.manager.register_computed(sequence)
        if len(kept) < len(emitted) or not self.manager.append(sequence, sequence.num_tokens):
            self.running.remove(sequence)
            self.manager.free(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), for_good=st.booleans())
    def preempt_or_abort(self, data: st.DataObject, for_good: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.manager.free(sequence)
        assert (sequence.block_ids, sequence.num_computed_tokens) == ([], 0)
        if not for_good and -(-sequence.num_tokens // BLOCK_SIZE) <= self.manager.num_blocks:
            self.waiting.append(sequence)

    @precondition(lambda self: hasattr(self, "manager"))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.manager.withdraw(data.draw(st.lists(st.integers(0, self.manager.num_blocks - 1), max_size=4)))

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        if hasattr(self, "manager"):
            held = {block for sequence in self.running for block in sequence.block_ids}
            assert self.manager.num_used == len(held)
            assert self.manager.num_free + self.manager.num_used == self.manager.num_blocks
            if not self.manager.enable_prefix_caching:
                assert len(held) == sum(len(sequence.block_ids) for sequence in self.running)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for sequence in self.running:
                self.manager.free(sequence)
            whole = make_sequence([99] * self.manager.num_tokens)
            assert self.manager.allocate(whole)
            assert sorted(whole.block_ids) == list(range(self.manager.num_blocks))

    def place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE

    def write(self, sequence: Sequence, token_ids: list[int], end: int) -> None:
        hashes = prefix_hashes(token_ids)
        for position in range(sequence.num_computed_tokens, end):
            block, offset = self.place(sequence, position)
            assert sum(block in other.block_ids for other in self.running) == 1, "a shared block is written"
            self.content[block, offset] = hashes[position]


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
