"""Scheduling without a model: the schedule never shows in the text, limits hold to the token, nothing is parked."""

import random

import pytest

from app.engine.scheduler_limits import SchedulerLimits
from tests.helpers.scripted_engine import MAX_TOKENS, VOCAB_SIZE, ScriptedEngine, continuation, no_drafts, uneven_drafts

PROMPTS = [
    [1 + (i * j) % 40 for j in range(length)] for i, length in enumerate([1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 40, 7])
]


@pytest.mark.parametrize("draft", [continuation, uneven_drafts, no_drafts])
@pytest.mark.parametrize(
    "sizes",
    [
        {"k": 0},
        {"k": 3},
        {"k": 4, "max_num_batched_tokens": 8},
        {"k": 5, "max_num_batched_tokens": 11, "num_blocks": 22},
        {"k": 2, "num_blocks": 24},
        {"k": 4, "num_blocks": 24, "caching": False, "max_num_seqs": 3},
        {"k": 9, "block_size": 1, "num_blocks": 80},
        {"k": 3, "max_num_seqs": 1},
    ],
)
def test_the_text_is_the_plain_one_whatever_the_schedule(sizes, draft):
    engine = ScriptedEngine(**sizes, draft=draft)
    for _ in range(2):  # the second time over what the first left in the cache
        sequences = [engine.add(prompt) for prompt in PROMPTS]
        engine.run()
        for prompt, sequence in zip(PROMPTS, sequences, strict=True):
            assert engine.output(sequence) == sequence.token_ids[len(prompt) :] == continuation(prompt, MAX_TOKENS)
            assert sequence.finish_reason == engine.deltas[sequence][-1].finish_reason == "length"
    if sizes.get("num_blocks"):
        assert engine.scheduler.num_preemptions > 0
    if sizes["k"] and draft is not no_drafts:
        assert engine.scheduler.speculation_stats.num_accepted > 0


def test_six_verifications_share_a_budget_of_eight():
    """D01: drafts shrink, nobody sits out, the budget is never exceeded."""
    engine = ScriptedEngine(max_num_seqs=6, max_num_batched_tokens=8, k=3)
    for i in range(6):
        engine.add([i + 1])
    engine.step()
    while len(engine.output(engine.sequences[5])) < MAX_TOKENS // 2:
        engine.step()
        assert len(engine.plans[-1].scheduled) == 6
        assert sum(1 + scheduled.num_draft_tokens for scheduled in engine.plans[-1].scheduled) <= 8
    assert {scheduled.num_draft_tokens for plan in engine.plans for scheduled in plan.scheduled} >= {0, 1}
    engine.run()


def test_a_budget_below_the_sequences_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens is 8, below max_num_seqs, 9"):
        SchedulerLimits(9, 8, 64)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("preempt_at", [60, 61, 62, 63])
def test_a_sequence_resumed_at_the_edge_of_its_context_stays_within(k, preempt_at):
    """B08: 40 prompt tokens in a context of 64; drafting begins with the preemption."""
    num_older = next(n for n in range(1, 5) if (n + preempt_at - 40) % 4 == 1)  # needs a block at that moment
    num_blocks = -(-preempt_at // 4) + (num_older + preempt_at - 41) // 4
    engine = ScriptedEngine(max_num_seqs=2, max_num_batched_tokens=128, max_model_len=64, num_blocks=num_blocks)
    older = engine.add([3] * num_older, max_tokens=preempt_at - 38)
    younger = engine.add(list(range(1, 41)), max_tokens=None)
    while engine.scheduler.num_preemptions == 0:
        assert engine.step()
    assert (younger.num_tokens, younger.num_computed_tokens, younger.slot) == (preempt_at, 0, None)
    engine.k = k
    engine.run()
    assert older.finish_reason == younger.finish_reason == "length"
    assert engine.output(younger) == continuation(list(range(1, 41)), 24)


@pytest.mark.parametrize("params", [{"max_tokens": None}, {"max_tokens": 2}, {"max_tokens": 1}])
def test_no_draft_goes_past_the_limits_of_its_request(params):
    """B09: room for the target's own token is kept."""
    engine = ScriptedEngine(max_model_len=32, k=8)
    sequence = engine.add([5, 6] * 15, **params)
    engine.run()
    num_tokens = params["max_tokens"] or 2
    assert len(engine.output(sequence)) == num_tokens
    assert all(30 + s.num_draft_tokens + 1 <= 30 + num_tokens for plan in engine.plans for s in plan.scheduled)


@pytest.mark.parametrize("prompt", [[7], [7] * 9])
@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_exactly_max_tokens_come_out_with_every_draft_accepted(max_tokens, prompt):
    """B04: delivered, counted and known are one number."""
    engine = ScriptedEngine(k=4)
    sequence = engine.add(prompt, max_tokens=max_tokens, ignore_eos=True)
    engine.run()
    assert len(engine.output(sequence)) == sequence.num_output_tokens == max_tokens
    stats = engine.scheduler.speculation_stats
    assert stats.num_steps + stats.num_accepted == max_tokens
    assert stats.num_accepted == stats.num_drafted, "a draft that could not be kept was asked for"
    assert engine.deltas[sequence][-1].stats == stats


def test_empty_drafts_are_plain_steps_beside_verifications():
    """D15: [[], [a, b], []], and a prompt of one token."""
    engine = ScriptedEngine(k=2, draft=lambda history, num: continuation(history, num) if history[0] == 2 else [])
    sequences = [engine.add([first]) for first in (1, 2, 3)]
    engine.run()
    for sequence in sequences:
        assert engine.output(sequence) == continuation(sequence.token_ids[:1], MAX_TOKENS)
    assert [sequence.stats.num_drafted > 0 for sequence in sequences] == [False, True, False]
    assert [sequence.stats.num_steps for sequence in sequences] == [24, 1 + 8, 24]


def test_the_request_may_ask_for_fewer_drafts_and_never_gets_more():
    engine = ScriptedEngine(k=3)
    asked = [None, 0, 1, 3, 99]
    sequences = [engine.add([i + 1], num_speculative_tokens=num) for i, num in enumerate(asked)]
    engine.run()
    assert [len(sequence.stats.drafted_per_position) for sequence in sequences] == [3, 0, 1, 3, 3]


@pytest.mark.parametrize(
    ("reason", "sizes", "params"),
    [
        ("request", {}, {"num_speculative_tokens": 1}),
        ("request", {}, {"num_speculative_tokens": 0}),
        ("budget", {"max_num_batched_tokens": 8, "max_num_seqs": 4}, {}),
        ("context", {"max_model_len": 16}, {"max_tokens": None}),
        ("kv", {"num_blocks": 30, "block_size": 1, "caching": False}, {}),
    ],
)
def test_drafts_that_are_not_granted_are_counted_by_what_stands_against_them(reason, sizes, params):
    engine = ScriptedEngine(k=3, **sizes)
    for i in range(4):
        engine.add([i + 1], **params)
    engine.run()
    num_granted = sum(scheduled.num_draft_tokens for plan in engine.plans for scheduled in plan.scheduled)
    refused = engine.scheduler.num_refused_drafts
    assert refused[reason] > 0
    assert all(not num for other, num in refused.items() if other not in (reason, "context"))
    num_after_prompts = len(engine.sequences) + engine.scheduler.num_preemptions  # these steps draft nothing
    num_decodes = engine.scheduler.speculation_stats.num_steps - num_after_prompts
    assert num_granted + sum(refused.values()) == 3 * num_decodes


@pytest.mark.parametrize(("length", "chunks"), [(35, [10, 10, 10, 5]), (21, [10, 10, 1]), (10, [10]), (1, [1])])
def test_a_prompt_gets_no_drafts_in_any_of_its_chunks(length, chunks):
    engine = ScriptedEngine(max_num_batched_tokens=10, k=4)
    engine.add(list(range(1, length + 1)))
    engine.run()
    shares = [(s.num_new_tokens, s.num_draft_tokens) for plan in engine.plans for s in plan.scheduled]
    assert shares[: len(chunks) + 1] == [*((num, 0) for num in chunks), (1, 4)]


def test_an_abort_frees_blocks_at_once_and_the_slot_in_the_next_plan():
    """D03, F12: waiting, in the midst of a prompt, in flight."""
    engine = ScriptedEngine(max_num_seqs=1, max_num_batched_tokens=8, k=3)
    running, waiting = engine.add(list(range(1, 20))), engine.add([4, 4])
    engine.step()
    assert engine.block_manager.num_used > 0
    plan = engine.plan()
    engine.scheduler.abort(running)
    assert (engine.block_manager.num_used, engine.scheduler.num_running) == (0, 0)
    assert engine.update(plan, engine.worker.step(plan)) == []
    engine.step()
    assert (engine.plans[-1].released_slots, [a.slot for a in engine.plans[-1].admitted]) == ([0], [0])
    late = engine.add([5])
    engine.scheduler.abort(late)
    engine.scheduler.abort(late)
    assert engine.scheduler.num_waiting == 0
    engine.run()
    assert engine.output(waiting) == continuation([4, 4], MAX_TOKENS)
    assert running.finish_reason == late.finish_reason == "abort"


def test_slots_to_release_wait_for_work():
    engine = ScriptedEngine()
    engine.add([1], max_tokens=1)
    engine.run()
    assert engine.plan() is None
    assert engine.worker.occupied_slots == {0}
    engine.add([2], max_tokens=1)
    engine.step()
    assert engine.plans[-1].released_slots == [0]
    assert engine.worker.occupied_slots == {0}


def test_the_last_admitted_gives_way_and_comes_back_first():
    engine = ScriptedEngine(max_num_seqs=3, num_blocks=12, caching=False)
    sequences = [engine.add([i + 1] * 8, max_tokens=16) for i in range(4)]
    order = []
    while engine.scheduler.has_work:
        engine.step()
        order += [s for s in sequences if s.is_finished and s not in order]
        if engine.scheduler.num_preemptions == 1 and sequences[2].status.name == "WAITING":
            assert sequences[2].num_tokens > 8, "its output is kept"
    assert engine.scheduler.num_preemptions > 0
    assert order == sequences, "first come, first served"
    assert all(engine.output(s) == continuation(s.token_ids[:8], 16) for s in sequences)


def test_a_long_prompt_comes_in_beside_decodes_which_never_pause():
    engine = ScriptedEngine(max_num_batched_tokens=16, k=2)
    short = [engine.add([i + 1], max_tokens=40) for i in range(3)]
    engine.step()
    long = engine.add([9] * 80, max_tokens=4)
    while not long.num_output_tokens:
        assert {delta.request_id for delta in engine.step()} >= {s.request_id for s in short if not s.is_finished}
        assert engine.plans[-1].scheduled[-1].slot == long.slot, "decodes first"
    assert len([plan for plan in engine.plans if plan.scheduled[-1].slot == long.slot]) >= 8
    engine.run()


def test_drafts_leave_room_for_the_next_prompt():
    """Five verifications could fill the budget in every step until they end; the newcomer starts all the same."""
    engine = ScriptedEngine(max_num_seqs=6, max_num_batched_tokens=8, k=3)
    for i in range(5):
        engine.add([i + 1], max_tokens=60)
    engine.step()
    engine.step()
    late = engine.add([8, 8, 8], max_tokens=1)
    for _ in range(3):
        engine.step()
    assert late.is_finished
    assert engine.scheduler.num_running == 5


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers():
    engine = ScriptedEngine(max_model_len=64, num_blocks=5, block_size=4)
    for length, numbers in ((64, ("64 tokens", "holds 64")), (20, ("20 tokens", "holds 20")), (0, ("no tokens",))):
        with pytest.raises(ValueError, match=".*".join(numbers)):
            engine.add([1] * length)
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("k", [0, 4])
def test_a_pool_smaller_than_the_context_ends_a_run_at_its_edge(k):
    engine = ScriptedEngine(max_model_len=64, num_blocks=5, block_size=4, k=k)
    sequences = [engine.add([i + 1] * 19, max_tokens=None) for i in range(2)]
    sequences.append(engine.add([7, 8], max_tokens=None))
    engine.run()
    assert [s.num_tokens for s in sequences] == [20, 20, 20]
    assert {s.finish_reason for s in sequences} == {"length"}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_requests_drain_to_an_empty_pool(seed, caching):
    """D08, D16: random stops, aborts and preemptions; the pool's sum holds after every step, and idle is empty."""
    rng = random.Random(seed)
    engine = ScriptedEngine(
        max_num_seqs=6, max_num_batched_tokens=12, num_blocks=30, k=4, caching=caching, draft=uneven_drafts
    )
    num_added = 0
    while num_added < 200 or engine.scheduler.has_work:
        for _ in range(rng.choice([0, 1, 1, 2])):
            if num_added < 200:
                prompt = [rng.randrange(1, 4)] * rng.randrange(1, 30) + [rng.randrange(1, 9)]
                stops = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 2]))]
                engine.add(prompt, max_tokens=rng.randrange(1, 60), stop_token_ids=stops)
                num_added += 1
        engine.k = rng.randrange(5)
        plan = engine.plan()
        if engine.sequences and rng.random() < 0.2:
            engine.scheduler.abort(rng.choice(engine.sequences))
        if plan is not None:
            engine.update(plan, engine.worker.step(plan))
        if engine.sequences and rng.random() < 0.2:
            engine.scheduler.abort(rng.choice(engine.sequences))
        engine.check()
    assert engine.block_manager.num_free == 30
    assert engine.scheduler.num_preemptions > 0
    reasons = [s.finish_reason for s in engine.sequences]
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) > 5
    for sequence in engine.sequences:
        output = engine.output(sequence)
        assert output == continuation(sequence.token_ids[: sequence.num_prompt_tokens], len(output))
        assert (engine.deltas[sequence] and engine.deltas[sequence][-1].finished) or sequence.finish_reason == "abort"
