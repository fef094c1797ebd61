"""What a step's result means for its sequences: ends, errors, cache hits, prompt logprobs, seeds."""

from dataclasses import replace

import pytest

from app.engine.sequence import derive_seed
from tests.helpers.scripted_engine import EOS, MAX_TOKENS, ScriptedEngine, continuation


def test_a_run_is_cut_at_the_first_stop_and_what_follows_is_nobodys():
    """B01, B03; and the dropped tokens never reach the prefix cache."""
    prompt = [9] * 7
    stop = continuation(prompt, 3)[-1]
    engine = ScriptedEngine(k=6)
    sequence = engine.add(prompt, stop_token_ids=[stop], logprobs=0)
    engine.run()
    first, delta = engine.deltas[sequence]
    assert first.token_ids + delta.token_ids == continuation(prompt, 3)
    assert delta.token_ids == [entry.token_id for entry in delta.logprobs]
    assert (delta.finish_reason, delta.stop_reason) == ("stop", stop)
    assert (sequence.stats.num_drafted, sequence.stats.num_accepted) == (6, 2), "what was dropped was not accepted"
    longer = engine.add(prompt + continuation(prompt, 20))
    engine.step()
    assert longer.num_cached_tokens == 8, "7 + 3 tokens were kept: two blocks"


def test_an_error_ends_its_sequence_visibly_and_alone():
    engine = ScriptedEngine(k=2)
    sequences = [engine.add([first]) for first in (1, 2, 3)]
    engine.step()
    plan = engine.plan()
    result = engine.worker.step(plan)
    result.sequences[1] = replace(result.sequences[1], token_ids=[], error="logits are NaN")
    engine.update(plan, result)
    last = engine.deltas[sequences[1]][-1]
    assert (last.finish_reason, last.error, last.token_ids) == ("error", "logits are NaN", [])
    assert last.stats is sequences[1].stats
    engine.run()
    assert [engine.output(s) == continuation(s.token_ids[:1], MAX_TOKENS) for s in sequences] == [True, False, True]


def test_no_token_where_one_was_due_is_an_error_and_never_parked():
    """D03: counters never go down."""
    engine = ScriptedEngine(k=3)
    sequence = engine.add([1, 2])
    engine.step()
    before = engine.scheduler.speculation_stats.num_accepted
    plan = engine.plan()
    result = engine.worker.step(plan)
    result.sequences[0] = replace(result.sequences[0], token_ids=[], num_accepted=0)
    (delta,) = engine.update(plan, result)
    assert delta.finish_reason == "error"
    assert "no token" in delta.error
    assert engine.scheduler.speculation_stats.num_accepted == before
    assert sequence.is_finished
    engine.run()


def test_what_the_cache_found_is_told_once_and_counted():
    engine = ScriptedEngine(k=2)
    prompt = list(range(1, 19))
    for num_cached in (0, 16):
        sequence = engine.add(prompt)
        engine.run()
        assert [delta.num_cached_tokens for delta in engine.deltas[sequence]][:2] == [num_cached, 0]
    assert engine.scheduler.num_prefix_hit_tokens == 16
    assert engine.scheduler.num_prefix_queried_tokens == 36
    assert engine.worker.num_rows < 2 * (18 + 3 * MAX_TOKENS)


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_come_whole_and_once(budget):
    engine = ScriptedEngine(max_num_batched_tokens=budget, k=2)
    prompt = list(range(1, 30))
    for _ in range(2):  # the second time the prompt is in the cache
        sequence = engine.add(prompt, prompt_logprobs=0)
        engine.run()
        first, *rest = [delta.prompt_logprobs for delta in engine.deltas[sequence]]
        assert first[0] is None
        assert [entry.token_id for entry in first[1:]] == prompt[1:]
        assert rest == [None] * len(rest)
    single = engine.add([3], prompt_logprobs=0)
    engine.run()
    assert engine.deltas[single][0].prompt_logprobs == [None]


def test_prompt_logprobs_start_again_with_a_preempted_prompt_and_not_after_it():
    engine = ScriptedEngine(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=14)
    older = engine.add([1, 2, 3], max_tokens=30)
    engine.step()
    prompt = list(range(1, 41))
    younger = engine.add(prompt, prompt_logprobs=0, max_tokens=12)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert 0 < len(engine.output(older)) < 30
    assert engine.output(younger) == []
    engine.run()
    assert [entry.token_id for entry in engine.deltas[younger][0].prompt_logprobs[1:]] == prompt[1:]

    engine = ScriptedEngine(max_num_seqs=2, num_blocks=14)
    engine.add([1, 2, 3], max_tokens=40)
    younger = engine.add(prompt[:20], prompt_logprobs=0, max_tokens=30)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert [delta.prompt_logprobs is not None for delta in engine.deltas[younger]] == [True] + [False] * 29


def test_choices_of_a_seeded_request_repeat_and_differ():
    assert derive_seed(7, 0) == 7
    assert derive_seed(-1, 0) == 2**64 - 1
    seeds = [derive_seed(7, index) for index in range(4)]
    assert seeds == [derive_seed(7, index) for index in range(4)]
    assert len({*seeds, *(derive_seed(8, index) for index in range(4))}) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_every_unseeded_choice_draws_its_own_seed():
    """A11."""
    engine = ScriptedEngine()
    sequences = [engine.add([1], index=index) for index in range(16)]
    assert len({sequence.seed for sequence in sequences}) == 16
    assert not any(sequence.is_seeded for sequence in sequences)


def test_the_worker_is_told_what_may_end_a_run():
    engine = ScriptedEngine()
    engine.add([1], stop_token_ids=[5, 3])
    engine.add([1], stop_token_ids=[5], ignore_eos=True, seed=11)
    plan = engine.plan()
    assert [a.stop_token_ids for a in plan.admitted] == [(EOS, 3, 5), (5,)]
    assert plan.admitted[1].seed == 11
    engine.update(plan, engine.worker.step(plan))


def test_a_plan_tells_the_slots_of_ended_sequences_from_those_that_gave_way():
    engine = ScriptedEngine(num_blocks=12, caching=False)
    sequences = [engine.add([first] * 8) for first in (1, 2)]
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    engine.scheduler.abort(sequences[0])
    engine.run()
    later = engine.add([3])
    engine.step()
    slots = {False: [], True: []}
    for plan in engine.plans:
        assert set(plan.finished_slots) <= set(plan.released_slots)
        for slot in plan.released_slots:
            slots[slot in plan.finished_slots].append(slot)
    assert len(slots[False]) == engine.scheduler.num_preemptions > 0
    assert len(slots[True]) == 2, "the aborted one and the one that ran to its end"
    assert not later.is_finished
