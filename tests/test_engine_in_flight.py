"""The engine with plans on their way: whatever drafts, texts are those of one plan at a time."""

import asyncio
import random
import threading
from dataclasses import replace

import pytest

from app.async_engine import AsyncEngine, EngineDeadError, EngineStalledError
from app.engine.outputs import GenerationRequest, RequestOutput
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from tests.helpers.deferring_executor import defer
from tests.test_lossless import (
    GREEDY,
    ONE_PAIR_A_METHOD,
    PROMPTS,
    SCENARIOS,
    make_engine,
    run,
    speculative_config,
    target,
)

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
MIXED = [replace(SEEDED, seed=i, presence_penalty=0.3) if i % 2 else GREEDY for i in range(len(PROMPTS))]
DETAILS = replace(GREEDY, logprobs=1, prompt_logprobs=0, ignore_eos=False)


def speculating(method: str, tiny_checkpoint, scenario: str = "batch", k: int | str = 3, **fields) -> LLMEngine:
    architecture = {name: architecture for architecture, name in ONE_PAIR_A_METHOD}[method]
    speculative = {**speculative_config(method, tiny_checkpoint, architecture), "num_speculative_tokens": k}
    return make_engine(target(method, tiny_checkpoint, architecture), speculative, **SCENARIOS[scenario], **fields)


@pytest.mark.parametrize("scenario", ["chunked", "preempted"])
@pytest.mark.parametrize("method", [method for _, method in ONE_PAIR_A_METHOD])
def test_texts_are_those_of_one_plan_at_a_time(method, scenario, tiny_checkpoint):
    expected = run(speculating(method, tiny_checkpoint, scenario), MIXED)
    engine = defer(speculating(method, tiny_checkpoint, scenario))
    for _ in range(2):  # the second time with what the prefix cache holds
        assert run(engine, MIXED) == expected
    stats = engine.stats()
    assert engine.executor.max_num_out == 2
    assert stats["num_drafted"] > 0
    assert (stats["num_preemptions"] > 0) == (scenario == "preempted")
    engine.shutdown()


@pytest.mark.parametrize("method", ["suffix", "draft_model", "mtp"])
def test_three_plans_and_chosen_draft_lengths_change_nothing(method, tiny_checkpoint):
    expected = run(speculating(method, tiny_checkpoint), MIXED)
    engine = defer(speculating(method, tiny_checkpoint, "chunked", "auto"), max_in_flight=3, ahead=False)
    assert run(engine, MIXED) == expected
    assert engine.executor.max_num_out == 3


@pytest.mark.parametrize("scenario", ["chunked", "preempted"])
def test_a_perfect_drafter_is_always_accepted(scenario, tiny_checkpoint):
    """Drafter KV that is stale, missing or shifted would leave the text right and show here alone."""
    engine = defer(speculating("perfect_draft_model", tiny_checkpoint, scenario))
    for _ in range(2):
        run(engine, GREEDY)
    stats = engine.stats()
    assert stats["num_accepted"] == stats["num_drafted"] > 0
    engine.shutdown()


def details(outputs: list[RequestOutput]) -> list[tuple]:
    """All that an answer says, logprobs to what a batch's shape leaves of them."""
    return [
        (
            [(entry.token_id, round(entry.logprob, 3)) for entry in (output.prompt_logprobs or [])[1:]],
            [
                (c.text, c.token_ids, c.finish_reason, c.stop_reason, [round(e.logprob, 3) for e in c.logprobs or []])
                for c in output.outputs
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("method", ["ngram", "mtp", "draft_model"])
def test_ends_choices_and_logprobs_are_those_of_one_plan_at_a_time(method, tiny_checkpoint):
    plain = speculating(method, tiny_checkpoint)
    (free,) = plain.generate(PROMPTS[4], GREEDY, use_tqdm=False)
    text, token_ids = free.outputs[0].text, free.outputs[0].token_ids
    params = [
        DETAILS,
        replace(DETAILS, stop=[text[len(text) // 2 :][:3]]),
        replace(DETAILS, stop=[text[-4:]], include_stop_str_in_output=True),
        replace(DETAILS, stop_token_ids=[token_ids[9]]),
        replace(DETAILS, stop_token_ids=[token_ids[9]], min_tokens=14),
        replace(SEEDED, stop_token_ids=list(range(0, 300, 7)), logprobs=1),
        replace(SEEDED, max_tokens=None),
        replace(DETAILS, max_tokens=1),
    ]
    prompts = [PROMPTS[4]] * len(params)
    expected = details(plain.generate(prompts, params, n=2, use_tqdm=False))
    engine = defer(speculating(method, tiny_checkpoint, "batch", max_num_batched_tokens=30))
    for _ in range(2):
        assert details(engine.generate(prompts, params, n=2, use_tqdm=False)) == expected
    reasons = {choice[2] for _, choices in expected for choice in choices}
    assert reasons == {"stop", "length"}
    while engine.has_work:
        assert engine.step() == [], "what comes behind an end is nobody's"
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    engine.shutdown()


@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_aborts_with_plans_out_take_nothing_from_those_that_stay(method, tiny_checkpoint):
    expected = run(speculating(method, tiny_checkpoint), MIXED)
    rng = random.Random(5)
    engine = defer(speculating(method, tiny_checkpoint, "chunked", num_blocks=30))
    for _ in range(2):
        token_ids: dict[str, list[int]] = {}
        for i, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
            for name in (f"stays-{i}", f"goes-{i}"):
                engine.add_request(GenerationRequest(name, prompt, params))
                token_ids[name] = []
        while engine.has_work:
            for delta in engine.step():
                token_ids[delta.request_id] += delta.token_ids
            if rng.random() < 0.3:
                engine.abort_request(f"goes-{rng.randrange(len(PROMPTS))}")
        for i, own in enumerate(expected):
            assert token_ids[f"stays-{i}"] == own
            assert token_ids[f"goes-{i}"] == own[: len(token_ids[f"goes-{i}"])]
    stats = engine.stats()
    assert stats["num_aborted"] > 4
    assert stats["num_drafter_faults"] == 0
    assert stats["num_free_blocks"] == stats["num_blocks"]
    engine.shutdown()


@pytest.mark.parametrize("method", ["ngram", "mtp", "draft_model"])
def test_the_edge_of_the_context_is_reached_with_plans_out(method, tiny_checkpoint):
    params = replace(GREEDY, max_tokens=None)
    prompts = [(PROMPTS[7] * 3)[:length] for length in (80, 90, 93, 94, 95)]
    expected = [o.outputs[0].token_ids for o in speculating(method, tiny_checkpoint).generate(prompts, params)]
    engine = defer(speculating(method, tiny_checkpoint))
    assert [o.outputs[0].token_ids for o in engine.generate(prompts, params)] == expected
    assert [len(token_ids) for token_ids in expected] == [16, 6, 3, 2, 1]
    engine.shutdown()


@pytest.mark.parametrize("method", ["ngram", "mtp", "draft_model"])
def test_unusable_logits_end_their_request_alone_with_a_plan_behind(method, tiny_checkpoint):
    """The plan behind asks for the failed sequence's last token once more; nobody sees what comes of it."""
    expected = run(speculating(method, tiny_checkpoint), GREEDY)
    engine = defer(speculating(method, tiny_checkpoint))
    worker, failing = engine.executor.worker, {5}
    verify, failed_at = worker.verifier.verify, []

    def poisoned(logits, batch, drafts):
        verdict = verify(logits, batch, drafts)
        for i, slot in enumerate(batch.slots.tolist()):
            if slot in failing and batch.num_logits_rows[i] and worker.state.num_tokens[slot] > len(PROMPTS[5]) + 4:
                failed_at.append(int(worker.state.num_tokens[slot]))
                verdict.failed[i], verdict.num_emitted[i], verdict.num_accepted[i] = True, 0, 0
        return verdict

    worker.verifier.verify = poisoned
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert [o.finish_reason for o in outputs] == ["error" if i == 5 else "length" for i in range(len(PROMPTS))]
    assert [o.token_ids for i, o in enumerate(outputs) if i != 5] == [e for i, e in enumerate(expected) if i != 5]
    assert outputs[5].token_ids == expected[5][: len(outputs[5].token_ids)]
    assert len(failed_at) == 2, "once for its result, once for the plan that was out"
    assert len(set(failed_at)) == 1
    failing.clear()
    assert run(engine, GREEDY) == expected
    occupied = [slot for slot, params in enumerate(worker.state.sampling_params) if params is not None]
    assert (worker.state.num_computed_tokens[occupied] < worker.state.num_tokens[occupied]).all()
    engine.shutdown()


def test_a_result_is_told_while_the_plan_behind_it_is_out(tiny_checkpoint):
    engine = defer(speculating("ngram", tiny_checkpoint, "alone"), ahead=False)
    step, carried_out = engine.executor.worker.speculative_step, []
    engine.executor.worker.speculative_step = lambda plan: carried_out.append(plan.step_id) or step(plan)
    engine.add_request(GenerationRequest("only", PROMPTS[4], GREEDY))
    for num in range(1, 5):
        assert len(engine.step()) == 1
        assert (carried_out, engine.executor.max_num_out) == (list(range(num)), 2)


class AsyncCase:
    """An AsyncEngine over a thread that carries plans out, and what its streams have said."""

    def __init__(self, tiny_checkpoint, stall_limit_s: float = 20.0) -> None:
        self.engine = AsyncEngine(defer(speculating("ngram", tiny_checkpoint)), stall_limit_s)
        self.worker = self.engine.engine.executor.worker

    async def collect(self, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        stream = self.engine.generate(GenerationRequest(name, prompt, params))
        return [token_id async for deltas in stream for delta in deltas for token_id in delta.token_ids]

    async def shutdown(self) -> None:
        await asyncio.to_thread(self.engine.shutdown)
        assert self.engine.engine.executor.num_shutdowns == 1


async def test_streams_over_plans_in_flight(tiny_checkpoint):
    expected = run(speculating("ngram", tiny_checkpoint), MIXED)
    case = AsyncCase(tiny_checkpoint)
    together = await asyncio.gather(*(case.collect(f"{i}", p, MIXED[i]) for i, p in enumerate(PROMPTS)))
    assert together == expected
    gone = asyncio.ensure_future(case.collect("gone", PROMPTS[4], replace(GREEDY, max_tokens=70)))
    await asyncio.sleep(0.03)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    for _ in range(300):
        stats = await case.engine.stats()
        if not case.engine.engine.has_work:
            break
        await asyncio.sleep(0.01)
    assert not case.engine.engine.has_work, "results that are due are taken, whoever has left"
    assert stats["num_free_blocks"] == stats["num_blocks"]
    await case.shutdown()


async def test_a_failed_step_raises_from_the_oldest_plan_and_drops_the_rest(tiny_checkpoint):
    case = AsyncCase(tiny_checkpoint)
    step = case.worker.speculative_step

    def broken(plan):
        if plan.step_id == 5:
            raise RuntimeError("the device is gone")
        return step(plan)

    case.worker.speculative_step = broken
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await case.collect("open", PROMPTS[4], GREEDY)
    with pytest.raises(EngineDeadError):
        case.engine.check_health()
    await case.shutdown()


async def test_a_hung_step_is_seen_behind_plans_that_wait(tiny_checkpoint):
    case = AsyncCase(tiny_checkpoint, stall_limit_s=0.3)
    step, hung = case.worker.speculative_step, asyncio.Event()
    loop, wait = asyncio.get_running_loop(), threading.Event()

    def slow(plan):
        if plan.step_id == 3:
            loop.call_soon_threadsafe(hung.set)
            wait.wait(10)
        return step(plan)

    case.worker.speculative_step = slow
    task = asyncio.ensure_future(case.collect("slow", PROMPTS[4], GREEDY))
    await asyncio.wait_for(hung.wait(), 5)
    await asyncio.sleep(0.5)
    with pytest.raises(EngineStalledError):
        case.engine.check_health()
    with pytest.raises(EngineStalledError):
        await task
    wait.set()
    with pytest.raises(EngineStalledError):
        case.engine.check_health()
    await asyncio.to_thread(case.engine.shutdown)
    assert case.engine.engine.executor.num_shutdowns == 2, "when it hung, and at its end"


async def test_shutdown_with_plans_out_tells_whoever_waits(tiny_checkpoint):
    case = AsyncCase(tiny_checkpoint)
    streams = [
        case.engine.generate(GenerationRequest(f"{i}", PROMPTS[4], replace(GREEDY, max_tokens=70))) for i in range(3)
    ]
    for stream in streams:
        await anext(stream)
    await case.shutdown()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
