"""The replica's admission, cancellation, health and live changes, without Ray and without a model."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from app.config import AppConfig
from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine.sampling_params import SamplingParams
from app.serve import target_replica
from app.serve.messages import Refused
from app.serve.metrics import ReplicaMetrics
from app.serve.target_replica import TargetReplica
from tests.helpers.stub_engine import StubEngine, factory_of

ReplicaFactory = Callable[..., Any]


@pytest.fixture
async def engine() -> StubEngine:
    return StubEngine()


@pytest.fixture
async def make_replica(engine: StubEngine) -> AsyncIterator[ReplicaFactory]:
    replicas = []

    async def make(**fields: Any) -> Any:
        speculative = {"method": "ngram", "num_speculative_tokens": 4}
        config = AppConfig.model_validate({"model": "some/model", "speculative_config": speculative} | fields)
        replica: Any = TargetReplica.__new__(TargetReplica)
        await replica.__init__(config, factory_of(engine))
        replicas.append(replica)
        return replica

    yield make
    for replica in replicas:
        replica.__del__()


def request(name: str = "r", max_tokens: int = 3, n: int = 1) -> GenerationRequest:
    return GenerationRequest(name, [1, 2], SamplingParams(max_tokens=max_tokens), n)


async def collect(replica: Any, *requests: GenerationRequest) -> list[list[Any]]:
    async def one(asked: GenerationRequest) -> list[Any]:
        return [item async for item in replica.generate(asked)]

    return await asyncio.gather(*(one(asked) for asked in requests))


def was_served(items: list[Any]) -> bool:
    return bool(items) and not isinstance(items[-1], Refused) and all(delta.finished for delta in items[-1])


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_step_is_an_item(make_replica: ReplicaFactory) -> None:
    replica = await make_replica()
    [items] = await collect(replica, request(max_tokens=3, n=2))
    assert [[delta.text for delta in step] for step in items] == [["0 ", "0 "], ["1 ", "1 "], ["2 ", "2 "]]
    assert [delta.finish_reason for delta in items[-1]] == ["length", "length"]


async def test_a_replica_proves_itself_with_a_real_token(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    engine.failure = RuntimeError("no device")
    with pytest.raises(RuntimeError, match="no device"):
        await make_replica()


@pytest.mark.parametrize(("nice", "is_said"), [(0, False), (15, True)])
async def test_a_replica_that_stands_back_says_so(
    nice: int,
    is_said: bool,
    make_replica: ReplicaFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda which, who: nice)
    with caplog.at_level("INFO"):
        await make_replica()
    assert ("RAY_worker_niceness=0" in caplog.text) == is_said


async def test_what_the_model_does_not_allow_is_named_as_in_the_file() -> None:
    async def refuse(_: AppConfig) -> Any:
        raise ValueError("kv_cache_memory is 1000: a block takes 46080 bytes; give at least 92160")

    replica: Any = TargetReplica.__new__(TargetReplica)
    with pytest.raises(ValueError, match=r"^args\.kv_cache_memory is 1000: a block"):
        await replica.__init__(AppConfig.model_validate({"model": "some/model"}), refuse)


async def test_a_first_token_that_fails_keeps_the_replica_from_ready(
    engine: StubEngine, make_replica: ReplicaFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(asked: GenerationRequest) -> AsyncIterator[list[SequenceDelta]]:
        yield [SequenceDelta(asked.request_id, 0, finish_reason="error", error="NaN logits")]

    monkeypatch.setattr(engine, "generate", generate)
    with pytest.raises(RuntimeError, match="NaN logits"):
        await make_replica()


async def test_overload_serves_what_fits_and_refuses_the_rest_at_once(
    engine: StubEngine, make_replica: ReplicaFactory
) -> None:
    """F14: 12 of 51 fit; a request of n=6 takes six places."""
    replica = await make_replica(max_num_seqs=4, deployment_config={"max_queued_requests": 8})
    engine.steps_allowed.clear()
    first = asyncio.create_task(collect(replica, request("six", n=6)))
    rest = asyncio.create_task(collect(replica, *(request(f"r{i}") for i in range(50))))
    await until(lambda: len(engine.open) == 7)
    await asyncio.sleep(0.05)
    assert len(engine.open) == 7
    engine.steps_allowed.set()
    assert all(was_served(items) for items in await first)
    results = await rest
    refused = [items for items in results if not was_served(items)]
    assert len(refused) == 44
    assert all(items == [Refused("overloaded", items[0].message)] for items in refused)
    assert "holds 12 sequences of at most 12" in refused[0][0].message

    again = await collect(replica, *(request(f"again{i}") for i in range(12)))
    assert all(was_served(items) for items in again)


async def test_more_choices_than_the_server_holds_are_the_requests_fault(make_replica: ReplicaFactory) -> None:
    replica = await make_replica(max_num_seqs=4, deployment_config={"max_queued_requests": 0})
    [[refused]] = await collect(replica, request(n=5))
    assert refused == Refused("invalid", "n is 5: use at most 4, which the server can hold")


async def test_what_the_engine_refuses_is_told_apart(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    replica = await make_replica()
    engine.refusal = ValueError("top_p is 0: use a number above 0 and up to 1")
    assert await collect(replica, request()) == [[Refused("invalid", "top_p is 0: use a number above 0 and up to 1")]]
    engine.refusal = RuntimeError("the step loop failed")
    assert await collect(replica, request()) == [[Refused("lost", "the step loop failed")]]
    engine.failure = RuntimeError("a rank died")
    assert await collect(replica, request()) == [[Refused("dead", "the engine has ended: a rank died")]]


async def test_a_cancelled_call_aborts_its_request(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    replica = await make_replica()
    engine.steps_allowed.clear()
    task = asyncio.create_task(collect(replica, request("gone", n=2)))
    await until(lambda: "gone" in engine.open)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == ["gone"]
    assert (await replica.stats())["num_open_requests"] == 0


async def test_an_abort_ends_what_serve_did_not_cancel(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    """G10: the cancellation got lost; the ingress says it again."""
    replica = await make_replica()
    engine.steps_allowed.clear()
    task = asyncio.create_task(collect(replica, request("gone")))
    await until(lambda: "gone" in engine.open)
    await replica.abort(["gone", "never seen"])
    await until(task.done)
    assert engine.aborted == ["gone"]


async def test_an_abort_that_overtakes_its_request_still_holds(
    engine: StubEngine, make_replica: ReplicaFactory
) -> None:
    replica = await make_replica()
    await replica.abort(["late"])
    assert await collect(replica, request("late")) == [[]]
    assert not engine.open


async def test_a_request_that_outlives_the_limit_is_ended(
    engine: StubEngine, make_replica: ReplicaFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_replica, "SWEEP_PERIOD_S", 0.01)
    replica = await make_replica(request_timeout_s=0.05)
    engine.steps_allowed.clear()
    async with asyncio.timeout(5):
        [items] = await collect(replica, request("endless"))
    assert items == [Refused("unavailable", "the request has run for 0.05 s, the server's limit")]
    assert engine.aborted == ["endless"]
    engine.steps_allowed.set()
    assert was_served((await collect(replica, request("next")))[0])


async def test_health_is_the_engines(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    replica = await make_replica()
    await replica.check_health()
    engine.failure = RuntimeError("work is pending, and no step has finished for 61 s")
    with pytest.raises(RuntimeError, match="no step has finished"):
        await replica.check_health()


async def test_why_the_engine_ended_its_ranks_is_said_before_their_end(
    engine: StubEngine, make_replica: ReplicaFactory
) -> None:
    replica = await make_replica()
    engine.failure = ActorDiedError()
    with pytest.raises(ActorDiedError):
        await replica.check_health()
    assert (await collect(replica, request()))[0][0].message.startswith("the engine has ended: The actor died")
    engine.stop_reason = RuntimeError("the step loop failed: out of memory")
    with pytest.raises(RayActorError, match=r"^the step loop failed: out of memory; then: The actor died"):
        await replica.check_health()
    expected = Refused("dead", "the engine has ended: the step loop failed: out of memory")
    assert await collect(replica, request()) == [[expected]]


async def test_requests_are_metered_by_how_they_end(
    engine: StubEngine, make_replica: ReplicaFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Counter[tuple[str, str]] = Counter()
    monkeypatch.setattr(ReplicaMetrics, "add", lambda self, name, value, label="": told.update([(name, label)]))
    replica = await make_replica(max_num_seqs=2, deployment_config={"max_queued_requests": 1})
    await collect(replica, request("a", max_tokens=3, n=2), request("b"), request("too many"))
    engine.failure = RuntimeError("the step loop failed")
    await collect(replica, request("late"))
    engine.failure = None
    engine.steps_allowed.clear()
    task = asyncio.create_task(collect(replica, request("gone")))
    await until(lambda: "gone" in engine.open)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    told_of_requests = {key: num for key, num in told.items() if key[0].startswith("request")}
    assert told_of_requests == {
        ("request_success", "length"): 3,
        ("request_success", "abort"): 1,
        ("requests_refused", "overloaded"): 1,
        ("requests_refused", "dead"): 1,
        ("request_prompt_tokens", ""): 3,
        ("request_generation_tokens", ""): 3,
        ("request_time_per_output_token_seconds", ""): 3,
    }


async def test_autoscaling_is_told_of_queue_and_kv(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    engine.counts |= {"num_waiting_tokens": 300, "kv_usage": 0.5}
    replica = await make_replica()
    assert await replica.record_autoscaling_stats() == {}
    async with asyncio.timeout(5):
        while not (told := await replica.record_autoscaling_stats()):
            await asyncio.sleep(0.005)
    assert told == {"queued_tokens": 300.0, "kv_usage": 0.5}


async def test_user_config_changes_the_draft_length(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    replica = await make_replica()
    await replica.reconfigure({"num_speculative_tokens": 2})
    assert engine.num_speculative_tokens == 2
    await replica.reconfigure({"num_speculative_tokens": 0})
    assert engine.num_speculative_tokens == 0
    await replica.reconfigure({})
    assert engine.num_speculative_tokens == 4


@pytest.mark.parametrize("wrong", [{"num_speculative_tokens": 5}, {"k": 1}, {"num_speculative_tokens": "many"}])
async def test_a_wrong_user_config_changes_nothing(
    wrong: dict[str, Any], engine: StubEngine, make_replica: ReplicaFactory
) -> None:
    replica = await make_replica()
    with pytest.raises(ValueError, match=r"^user_config\."):
        await replica.reconfigure(wrong)
    assert engine.num_speculative_tokens == 4


async def test_a_replica_that_goes_away_shuts_its_engine_down(engine: StubEngine, make_replica: ReplicaFactory) -> None:
    replica = await make_replica()
    replica.__del__()
    assert engine.was_shut_down
