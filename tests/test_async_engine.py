"""The engine behind an event loop: streams, cancellation, failure and health."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from app import async_engine
from app.async_engine import AsyncEngine, EngineDeadError, EngineStalledError
from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.engine_config import EngineConfig

PROMPT = [5, 9, 14, 9, 14, 9, 14, 77, 120]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=400)


@pytest.fixture
async def engine(tiny_checkpoint):
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        device="cpu",
        max_model_len=512,
        block_size=8,
        max_num_seqs=4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    engine = await AsyncEngine.create(config, progress=False, stall_limit_s=0.5)
    yield engine
    await asyncio.to_thread(engine.shutdown)


async def collect(engine: AsyncEngine, request: GenerationRequest) -> list[int]:
    token_ids = []
    async for deltas in engine.generate(request):
        for delta in deltas:
            token_ids += delta.token_ids
    return token_ids


async def drain(stream) -> None:
    async for _ in stream:
        pass


async def wait_until_idle(engine: AsyncEngine) -> dict:
    for _ in range(200):
        stats = await engine.stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {stats}")


async def test_concurrent_streams_give_what_each_gives_alone(engine):
    prompts = [PROMPT, PROMPT[:3], [8], [44] * 30, PROMPT[::-1], [3, 4, 5]]
    alone = [await collect(engine, GenerationRequest(f"alone-{i}", p, GREEDY)) for i, p in enumerate(prompts)]
    together = await asyncio.gather(
        *(collect(engine, GenerationRequest(f"together-{i}", p, GREEDY)) for i, p in enumerate(prompts))
    )
    assert list(together) == alone
    assert {len(token_ids) for token_ids in alone} == {20}


async def test_between_its_first_delivery_and_its_end_a_stream_comes_some_steps_at_a_time(engine, monkeypatch):
    """The longer the pause, the fewer deliveries; the same tokens, and the end is not waited for."""
    request = GenerationRequest("first", PROMPT, ENDLESS)
    expected = await collect(engine, request)
    num_deliveries = []
    for i, (pause_s, streamed) in enumerate(((1e-9, True), (1e9, True), (1e-9, False))):
        monkeypatch.setattr(async_engine, "DELIVERY_S", pause_s)
        monkeypatch.setattr(async_engine, "MOST_PAUSE_S", pause_s)
        asked = replace(request, request_id=f"paced-{i}", streamed=streamed)
        deliveries = [deltas async for deltas in engine.generate(asked)]
        assert [token for deltas in deliveries for delta in deltas for token in delta.token_ids] == expected
        assert all(len(deltas) == 1 for deltas in deliveries)
        assert deliveries[-1][0].finish_reason == "length"
        assert deliveries[-1][0].stats is not None
        num_deliveries.append(len(deliveries))
    assert num_deliveries[0] > 20
    assert num_deliveries[1:] == [2, 2]


def test_streams_are_given_what_has_come_at_the_same_moments():
    moments = {now + async_engine.until_delivery(now, 16) for now in (7.01, 7.03, 7.07, 7.1)}
    assert len({round(moment, 6) for moment in moments}) == 1
    for now in (0.0, 3.3, 1000.001):
        assert 0 < async_engine.until_delivery(now, 1) <= async_engine.DELIVERY_S
        assert 0 < async_engine.until_delivery(now, 1000) <= async_engine.MOST_PAUSE_S


async def test_closing_a_stream_frees_its_sequences(engine):
    """F12: running, waiting and n = 2 alike."""
    streams = [engine.generate(GenerationRequest(f"gone-{i}", PROMPT, ENDLESS, n=2)) for i in range(4)]
    for stream in streams[:2]:
        assert await anext(stream)
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams[2:]]
    await asyncio.sleep(0.02)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
    stats = await wait_until_idle(engine)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_aborted"] >= 2
    assert engine.num_open_requests == 0


async def test_a_refused_request_raises_before_the_first_delta(engine):
    with pytest.raises(ValueError, match="no tokens"):
        await collect(engine, GenerationRequest("empty", [], GREEDY))
    assert len(await collect(engine, GenerationRequest("good", PROMPT, GREEDY))) == 20


async def test_a_failing_step_ends_every_stream_and_turns_health_red(engine):
    engine.check_health()
    stream = engine.generate(GenerationRequest("open", PROMPT, ENDLESS))
    await anext(stream)

    def broken(plan):
        raise RuntimeError("the device is gone")

    engine.engine.executor.submit = broken
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await drain(stream)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await collect(engine, GenerationRequest("late", PROMPT, GREEDY))


async def test_health_means_progress(engine):
    """G02: a step that hangs while work is pending is unhealthy, for good, and whoever waits is told; an idle engine
    is healthy."""
    submit = engine.engine.executor.submit
    await collect(engine, GenerationRequest("warm", PROMPT, GREEDY))
    await asyncio.sleep(0.7)
    engine.check_health()

    def slow(plan):
        time.sleep(1.0)
        return submit(plan)

    engine.engine.executor.submit = slow
    task = asyncio.ensure_future(collect(engine, GenerationRequest("slow", PROMPT, replace(GREEDY, max_tokens=1))))
    await asyncio.sleep(0.8)
    with pytest.raises(EngineStalledError):
        engine.check_health()
    with pytest.raises(EngineStalledError, match="no step has finished for"):
        await task
    await asyncio.sleep(0.5)
    with pytest.raises(EngineStalledError):
        engine.check_health()


async def test_a_rank_that_hangs_while_nothing_runs_is_given_up(engine):
    """Looking at the numbers is all that an idle engine asks of its rank."""
    ended = threading.Event()
    executor = engine.engine.executor
    shutdown = executor.shutdown

    def hang() -> dict[str, float]:
        assert ended.wait(timeout=20)
        raise RuntimeError("the rank was killed")

    executor.stats, executor.shutdown = hang, lambda: (ended.set(), shutdown())
    await asyncio.sleep(0.7)
    engine.check_health()
    looking = asyncio.ensure_future(engine.stats())
    await asyncio.sleep(0.1)
    asking = asyncio.ensure_future(collect(engine, GenerationRequest("behind it", PROMPT, GREEDY)))
    with pytest.raises(EngineStalledError, match="no step has finished for"):
        await asyncio.wait_for(asking, timeout=5)
    with pytest.raises(RuntimeError, match="the rank was killed"):
        await asyncio.wait_for(looking, timeout=5)
    with pytest.raises(EngineStalledError):
        engine.check_health()


async def test_a_step_that_comes_back_after_it_was_given_up_is_the_last(engine):
    submit, num_steps = engine.engine.executor.submit, 0

    def slow(plan):
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.8)
        return submit(plan)

    engine.engine.executor.submit = slow
    with pytest.raises(EngineStalledError):
        await collect(engine, GenerationRequest("slow", PROMPT, ENDLESS))
    assert isinstance(engine.stop_reason, EngineStalledError)
    await asyncio.to_thread(engine._thread.join, 5.0)
    assert not engine._thread.is_alive()
    assert num_steps == 1


async def test_many_early_cancels_leave_nothing_behind(engine):
    async def cancelled(i: int) -> None:
        task = asyncio.ensure_future(collect(engine, GenerationRequest(f"early-{i}", PROMPT, ENDLESS)))
        await asyncio.sleep(0.001 * (i % 7))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(cancelled(i) for i in range(100)))
    stats = await wait_until_idle(engine)
    assert stats["num_free_blocks"] == stats["num_blocks"]
