"""Plans that go out before the results of those before them: nothing shows in the text, and nothing is overrun."""

import random
from dataclasses import replace

import pytest

from tests.helpers.scripted_engine import (
    EOS,
    MAX_TOKENS,
    VOCAB_SIZE,
    ScriptedEngine,
    continuation,
    next_token,
    no_drafts,
    uneven_drafts,
)

PROMPTS = [
    [1 + (i * j) % 40 for j in range(length)] for i, length in enumerate([1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 40, 7])
]


@pytest.mark.parametrize(("max_in_flight", "num_microbatches"), [(2, None), (3, None), (2, 2), (2, 1)])
@pytest.mark.parametrize("draft", [continuation, uneven_drafts, no_drafts])
@pytest.mark.parametrize(
    "sizes",
    [
        {"k": 0},
        {"k": 4, "max_num_batched_tokens": 8},
        {"k": 5, "max_num_batched_tokens": 11, "num_blocks": 22},
        {"k": 4, "num_blocks": 24, "caching": False, "max_num_seqs": 3},
        {"k": 9, "block_size": 1, "num_blocks": 80},
        {"k": 3, "max_num_seqs": 1},
        {"k": 3, "max_model_len": 44},
    ],
)
def test_the_text_is_the_plain_one_however_many_plans_are_out(sizes, draft, max_in_flight, num_microbatches):
    engine = ScriptedEngine(**sizes, draft=draft, max_in_flight=max_in_flight, num_microbatches=num_microbatches)
    for _ in range(2):  # the second time over what the first left in the cache
        sequences = [engine.add(prompt) for prompt in PROMPTS]
        engine.run()
        for prompt, sequence in zip(PROMPTS, sequences, strict=True):
            num_tokens = min(MAX_TOKENS, engine.scheduler.limits.max_model_len - len(prompt))
            assert engine.output(sequence) == sequence.token_ids[len(prompt) :] == continuation(prompt, num_tokens)
            assert sequence.finish_reason == "length"
    if sizes.get("num_blocks"):
        assert engine.scheduler.num_preemptions > 0


def shares(engine: ScriptedEngine) -> list[list[tuple[int, int]]]:
    """Known tokens and drafts of every sequence of the plans that are out."""
    return [[(s.num_new_tokens, s.num_draft_tokens) for s in plan.scheduled] for plan, _ in engine.in_flight]


def test_the_next_plan_goes_out_behind_a_chunk_and_behind_a_verification():
    engine = ScriptedEngine(max_num_seqs=1, max_num_batched_tokens=10, k=3, max_in_flight=3)
    sequence = engine.add(list(range(1, 22)))
    engine.fill()
    assert shares(engine) == [[(10, 0)], [(10, 0)], [(1, 0)]]
    engine.step()
    engine.step()
    assert shares(engine) == [[(1, 0)], [(1, 3)]]
    engine.fill()
    assert shares(engine) == [[(1, 0)], [(1, 3)], [(1, 3)]]
    assert (sequence.least_num_tokens, sequence.most_num_tokens) == (24, 30)
    assert len(sequence.block_ids) == 8, "29 of 30 tokens, all drafts accepted"
    engine.run()
    assert engine.output(sequence) == continuation(list(range(1, 22)), MAX_TOKENS)


@pytest.mark.parametrize("draft", [continuation, no_drafts])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_plan_goes_out_for_a_sequence_that_is_certain_to_end(max_tokens, draft):
    """Drafts that were not made or not kept cost it nothing: it goes on as far as they may have failed."""
    engine = ScriptedEngine(k=3, draft=draft, max_in_flight=2)
    sequence = engine.add([7], max_tokens=max_tokens)
    engine.run()
    assert len(engine.output(sequence)) == max_tokens
    num_needed = max_tokens if draft is no_drafts else 1 + -(-(max_tokens - 1) // 4)
    assert num_needed <= len(engine.plans) <= num_needed + (draft is continuation)
    stats = engine.scheduler.speculation_stats
    assert stats.num_steps + stats.num_accepted == max_tokens
    assert stats.num_accepted == stats.num_drafted, "a draft that could not be kept was counted"
    if draft is no_drafts:
        granted = [plan.scheduled[0].num_draft_tokens for plan in engine.plans[1:]]
        assert granted == [min(3, max_tokens - num_before - 1) for num_before in range(1, max_tokens)]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("room", range(1, 14))
def test_the_edge_of_the_context_is_reached_and_never_passed(room, max_in_flight):
    """The worker asserts that no row and no token lies beyond it."""
    for draft in (continuation, uneven_drafts, no_drafts):
        engine = ScriptedEngine(max_model_len=32, k=4, draft=draft, max_in_flight=max_in_flight)
        prompt = [3] * (32 - room)
        sequence = engine.add(prompt, max_tokens=None)
        engine.run()
        assert engine.output(sequence) == continuation(prompt, room)


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_a_pool_smaller_than_the_context_ends_runs_at_its_edge(max_in_flight):
    engine = ScriptedEngine(max_model_len=64, num_blocks=5, block_size=4, k=4, max_in_flight=max_in_flight)
    sequences = [engine.add([i + 1] * 19, max_tokens=None) for i in range(2)]
    sequences.append(engine.add([7, 8], max_tokens=None))
    engine.run()
    assert [(s.num_tokens, s.finish_reason) for s in sequences] == [(20, "length")] * 3


def eos_at(length: int):
    """A target that says EOS as token `length`, and goes on behind it if it is asked to."""
    return lambda history: EOS if len(history) == length - 1 else next_token(history)


def test_what_comes_behind_an_end_is_dropped_and_not_counted():
    engine = ScriptedEngine(k=2, target=eos_at(9), draft=no_drafts, max_in_flight=2)
    sequence = engine.add([5, 6, 7])
    while not sequence.is_finished:
        engine.step()
    stats = engine.scheduler.speculation_stats.num_steps
    assert (len(engine.in_flight), engine.scheduler.has_work) == (1, True), "a result is due"
    assert engine.block_manager.num_used == 0, "nobody waits for it"
    assert engine.take() == []
    assert not engine.scheduler.has_work
    assert (engine.deltas[sequence][-1].finish_reason, len(engine.output(sequence))) == ("stop", 6)
    assert engine.scheduler.speculation_stats.num_steps == stats == 6


@pytest.mark.parametrize("length", range(6, 22))
def test_blocks_are_handed_on_while_a_plan_still_writes_to_them(length):
    """The next owner computes them in a later plan, and what the prefix cache shares is not written to.

    The worker checks before each read that a block holds what its reader believes.
    """
    engine = ScriptedEngine(num_blocks=7, block_size=4, k=3, target=eos_at(length), max_in_flight=3)
    prompt = [9, 8, 7, 6, 5]
    first = engine.add(prompt, max_tokens=None)
    while not first.is_finished:
        engine.step()
    assert engine.in_flight, "the worker goes on with a sequence that has ended"
    held = {block for plan in engine.plans for admitted in plan.admitted for block in admitted.block_ids}
    held |= {block for plan in engine.plans for scheduled in plan.scheduled for block in scheduled.new_block_ids}
    again = engine.add(first.token_ids[:-1], max_tokens=None)
    other = engine.add([30] * 5, max_tokens=2)
    engine.fill()
    assert again.num_cached_tokens == (length - 2) // 4 * 4
    assert held & {*again.block_ids[again.num_cached_tokens // 4 :], *other.block_ids}
    engine.run()
    assert again.token_ids == first.token_ids
    assert engine.output(other)[0] == eos_at(length)([30] * 5)


def test_nobody_gives_way_before_all_results_are_in():
    engine = ScriptedEngine(max_num_seqs=4, num_blocks=14, k=3, draft=uneven_drafts, caching=False, max_in_flight=2)
    sequences = [engine.add([i + 1] * 6) for i in range(4)]
    while engine.scheduler.has_work:
        num_preemptions, num_out = engine.scheduler.num_preemptions, len(engine.in_flight)
        engine.plan()
        assert engine.scheduler.num_preemptions == num_preemptions or num_out == 0
        if len(engine.in_flight) == 2 or len(engine.in_flight) == num_out:
            engine.take()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.output(s) == continuation(s.token_ids[:6], MAX_TOKENS) for s in sequences)


@pytest.mark.parametrize("num_out", [1, 2, 3])
def test_an_abort_with_plans_out_frees_at_once_and_waits_for_nothing(num_out):
    engine = ScriptedEngine(max_num_seqs=1, max_num_batched_tokens=8, k=3, max_in_flight=num_out)
    prompt = list(range(1, 30))
    for num_steps in range(7):  # in the midst of the prompt, at its end, behind it
        running, waiting = engine.add(prompt), engine.add([4, 4], max_tokens=5)
        for _ in range(num_steps):
            engine.step()
        engine.fill()
        assert len(engine.in_flight) == num_out
        engine.scheduler.abort(running)
        assert engine.block_manager.num_used == 0
        num_told = len(engine.deltas[running])
        engine.run()
        assert len(engine.deltas[running]) == num_told
        assert engine.output(waiting) == continuation([4, 4], 5)


def test_an_error_ends_its_sequence_whatever_was_planned_behind_it():
    engine = ScriptedEngine(k=2, max_in_flight=2)
    sequences = [engine.add([first]) for first in (1, 2, 3)]
    engine.step()
    engine.fill()
    plan, _ = engine.in_flight[0]
    result = engine.worker.step(plan)
    result.sequences[1] = replace(result.sequences[1], token_ids=[], num_accepted=0, error="logits are NaN")
    engine.update(plan, result)
    engine.run()
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]
    assert [engine.output(s) == continuation(s.token_ids[:1], MAX_TOKENS) for s in sequences] == [True, False, True]
    assert [delta.finished for delta in engine.deltas[sequences[1]]].count(True) == 1


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_come_whole_from_chunks_that_were_out_together(budget):
    engine = ScriptedEngine(max_num_batched_tokens=budget, k=2, max_in_flight=3)
    prompt = list(range(1, 30))
    for _ in range(2):
        sequence = engine.add(prompt, prompt_logprobs=0, logprobs=0)
        engine.run()
        first, *rest = [delta.prompt_logprobs for delta in engine.deltas[sequence]]
        assert [entry.token_id for entry in first[1:]] == prompt[1:]
        assert rest == [None] * len(rest)
        logprobs = [entry.token_id for delta in engine.deltas[sequence] for entry in delta.logprobs]
        assert logprobs == engine.output(sequence)


def test_microbatches_take_turns_and_know_their_tokens():
    engine = ScriptedEngine(k=2, max_in_flight=2, num_microbatches=2)
    for i in range(5):
        engine.add([i + 1])
    engine.step()
    for _ in range(6):
        engine.fill()
        slots = [[scheduled.slot for scheduled in plan.scheduled] for plan, _ in engine.in_flight]
        assert sorted(slots[0] + slots[1]) == list(range(5)), "everyone is in one of the two"
        assert sorted(map(len, slots)) == [2, 3]
        assert all(s.num_due_steps <= 1 for s in engine.sequences)
        engine.take()
    engine.num_microbatches = 1
    engine.take()
    engine.fill()
    assert [len(plan.scheduled) for plan, _ in engine.in_flight] == [5]
    engine.run()


@pytest.mark.parametrize(("max_in_flight", "num_microbatches"), [(2, None), (3, None), (2, 2)])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_two_hundred_requests_drain_to_an_empty_pool(seed, caching, max_in_flight, num_microbatches):
    """Random stops, aborts, preemptions and pauses with plans out; the sums hold after every plan and result."""
    rng = random.Random(seed)
    engine = ScriptedEngine(
        max_num_seqs=6,
        max_num_batched_tokens=12,
        max_model_len=64,
        num_blocks=30,
        k=4,
        caching=caching,
        draft=uneven_drafts,
        max_in_flight=max_in_flight,
        num_microbatches=num_microbatches,
    )
    num_added = 0
    while num_added < 200 or engine.scheduler.has_work:
        for _ in range(rng.choice([0, 1, 1, 2])):
            if num_added < 200:
                prompt = [rng.randrange(1, 4)] * rng.randrange(1, 30) + [rng.randrange(1, 9)]
                stops = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 2]))]
                engine.add(prompt, max_tokens=rng.choice([None, rng.randrange(1, 60)]), stop_token_ids=stops)
                num_added += 1
        engine.k = rng.randrange(5)
        engine.fill()
        if engine.sequences and rng.random() < 0.2:
            engine.scheduler.abort(rng.choice(engine.sequences))
        for _ in range(rng.randrange(1, max_in_flight + 1)):
            engine.take()
        engine.check()
    assert not engine.in_flight
    assert engine.block_manager.num_free == 30
    assert engine.scheduler.num_preemptions > 0
    reasons = [s.finish_reason for s in engine.sequences]
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) > 5
    for sequence in engine.sequences:
        output = engine.output(sequence)
        assert output == continuation(sequence.token_ids[: sequence.num_prompt_tokens], len(output))
        assert (engine.deltas[sequence] and engine.deltas[sequence][-1].finished) or sequence.finish_reason == "abort"
