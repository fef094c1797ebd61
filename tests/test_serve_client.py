"""The handle's side of a stream: what becomes of errors, and of clients that leave."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.api.errors import EngineUnavailableError, QueueFullError
from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine.sampling_params import SamplingParams
from app.serve import replica_client
from app.serve.messages import Refused
from app.serve.replica_client import ReplicaClient

REQUEST = GenerationRequest("r", [1], SamplingParams(max_tokens=2))
BROKEN_CALL = AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata())
DELTAS = [[SequenceDelta("r", 0, "a")], [SequenceDelta("r", 0, "b", finish_reason="length")]]


class FakeStream:
    """A DeploymentResponseGenerator over a script; an exception in it is raised, None waits for ever."""

    def __init__(self, script: list[Any]) -> None:
        self._script = iter(script)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            if item is None:
                await asyncio.Event().wait()
            return item
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    """Answers one attempt after the other by a script each; the last script serves all that follow."""

    def __init__(self, *scripts: list[Any], health: Exception | None = None) -> None:
        self._scripts = scripts
        self.requests: list[GenerationRequest] = []
        self.broadcasts: list[tuple[str, list[str]]] = []
        self.broadcast_failure: Exception | None = None
        self._health = health
        self.generate = SimpleNamespace(remote=self._generate)
        self.check_health = SimpleNamespace(remote=self._check_health)

    def options(self, stream: bool) -> "FakeHandle":
        assert stream
        return self

    def _generate(self, request: GenerationRequest) -> FakeStream:
        self.requests.append(request)
        self.stream = FakeStream(self._scripts[min(len(self.requests), len(self._scripts)) - 1])
        return self.stream

    async def _check_health(self) -> None:
        if self._health is not None:
            raise self._health

    def broadcast(self, method: str, request_ids: list[str]) -> Any:
        async def results_async(return_exceptions: bool) -> list[None]:
            assert return_exceptions
            if self.broadcast_failure is not None:
                raise self.broadcast_failure
            return [None]

        self.broadcasts.append((method, request_ids))
        return SimpleNamespace(results_async=results_async)


async def collect(handle: FakeHandle, request: GenerationRequest = REQUEST, retry_limit_s: float = 5.0) -> list[Any]:
    client = ReplicaClient(handle, retry_limit_s)  # type: ignore[arg-type]
    return [item async for item in client.generate(request)]


async def test_deltas_pass_as_they_are() -> None:
    handle = FakeHandle(DELTAS)
    assert await collect(handle) == DELTAS
    assert not handle.stream.cancelled


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (Refused("invalid", "top_p is 0: use more"), ValueError, "top_p is 0: use more"),
        (Refused("overloaded", "the server is full"), QueueFullError, "the server is full"),
        (Refused("unavailable", "the step loop failed"), EngineUnavailableError, "the step loop failed"),
        (BackPressureError(9, 8), QueueFullError, "backpressure"),
        (ActorDiedError(), EngineUnavailableError, "the replica that held this request is gone"),
        (BROKEN_CALL, EngineUnavailableError, "the replica that held this request is gone"),
        (DeploymentUnavailableError(DeploymentID("T")), EngineUnavailableError, "no replica runs"),
    ],
)
async def test_what_goes_wrong_has_the_protocols_error(item: Any, error: type[Exception], message: str) -> None:
    handle = FakeHandle([DELTAS[0], item])
    with pytest.raises(error, match=message):
        await collect(handle)
    assert not handle.stream.cancelled


async def test_a_client_that_leaves_is_told_to_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "ABORT_PERIOD_S", 0.01)
    handle = FakeHandle([DELTAS[0], None])
    stream = ReplicaClient(handle, retry_limit_s=5.0).generate(REQUEST)  # type: ignore[arg-type]
    assert await anext(stream) == DELTAS[0]
    await stream.aclose()
    assert handle.stream.cancelled
    await asyncio.sleep(0.1)
    assert handle.broadcasts == [("abort", ["r"])]


async def test_a_client_that_leaves_before_the_first_token_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "ABORT_PERIOD_S", 0.01)
    handle = FakeHandle([None])
    task = asyncio.create_task(collect(handle))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    assert handle.stream.cancelled
    assert handle.broadcasts == [("abort", ["r"])]


async def test_many_that_leave_share_a_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "ABORT_PERIOD_S", 0.05)
    handle = FakeHandle([DELTAS[0]] * 20 + [None])
    client = ReplicaClient(handle, retry_limit_s=5.0)  # type: ignore[arg-type]
    streams = [client.generate(GenerationRequest(f"r{i}", [1], SamplingParams())) for i in range(20)]
    for stream in streams:
        await anext(stream)
        await stream.aclose()
    await asyncio.sleep(0.2)
    assert handle.broadcasts == [("abort", [f"r{i}" for i in range(20)])]


async def test_a_broadcast_that_fails_is_repeated_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_client, "ABORT_PERIOD_S", 0.001)
    monkeypatch.setattr(replica_client, "MAX_ABORT_ATTEMPTS", 3)
    handle = FakeHandle([DELTAS[0], None], [DELTAS[0], None])
    handle.broadcast_failure = RuntimeError("no controller")
    client = ReplicaClient(handle, retry_limit_s=5.0)  # type: ignore[arg-type]
    for name in ("first", "second"):
        stream = client.generate(GenerationRequest(name, [1], SamplingParams()))
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.1)
    assert handle.broadcasts == [("abort", ["first"])] * 3 + [("abort", ["second"])] * 3


async def test_health_is_the_replicas() -> None:
    await ReplicaClient(FakeHandle([]), 5.0).check_health()  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailableError, match="no step has finished"):
        await ReplicaClient(FakeHandle([], health=RuntimeError("no step has finished")), 5.0).check_health()  # type: ignore


async def test_health_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "HEALTH_TIMEOUT_S", 0.02)
    handle = FakeHandle([])
    handle.check_health = SimpleNamespace(remote=lambda: asyncio.Event().wait())
    with pytest.raises(EngineUnavailableError, match="no replica has answered within"):
        await ReplicaClient(handle, retry_limit_s=5.0).check_health()  # type: ignore[arg-type]


LOST, DEAD = Refused("lost", "the step loop failed"), Refused("dead", "the engine has ended")


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "RETRY_PERIOD_S", 0.0)


@pytest.mark.usefixtures("_no_pause")
@pytest.mark.parametrize(
    "scripts",
    [
        [[LOST], DELTAS],
        [[ActorDiedError()], DELTAS],
        [[BROKEN_CALL], DELTAS],
        [[DEAD], [DEAD], [DEAD], DELTAS],
        [[DEAD], [LOST], [DEAD], DELTAS],
        [[LOST], [DEAD], [ActorDiedError()], [DEAD], [ActorDiedError()], DELTAS],
    ],
)
async def test_a_request_of_which_nothing_was_passed_on_is_sent_again(scripts: list[list[Any]]) -> None:
    """Once to a replica that takes it, and as often as needed to find one. Its deltas bear its own name."""
    handle = FakeHandle(*scripts)
    assert await collect(handle) == DELTAS
    names = [request.request_id for request in handle.requests]
    assert len(set(names)) == len(scripts)
    assert names[0] == "r"


@pytest.mark.usefixtures("_no_pause")
async def test_a_request_is_not_lost_twice() -> None:
    handle = FakeHandle([LOST], [LOST], DELTAS)
    with pytest.raises(EngineUnavailableError, match="the step loop failed"):
        await collect(handle)
    assert len(handle.requests) == 2


@pytest.mark.usefixtures("_no_pause")
async def test_a_request_that_was_begun_twice_is_not_begun_again() -> None:
    handle = FakeHandle([LOST], [DELTAS[0], ActorDiedError()], DELTAS)
    with pytest.raises(EngineUnavailableError, match="the replica that held this request is gone"):
        await collect(handle, replace(REQUEST, streamed=False))
    assert len(handle.requests) == 2


@pytest.mark.usefixtures("_no_pause")
async def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    handle = FakeHandle([DELTAS[0], LOST], DELTAS)
    with pytest.raises(EngineUnavailableError, match="the step loop failed"):
        await collect(handle)
    assert len(handle.requests) == 1


@pytest.mark.usefixtures("_no_pause")
async def test_an_answer_that_is_waited_for_whole_is_begun_again() -> None:
    handle = FakeHandle([DELTAS[0], LOST], DELTAS)
    assert await collect(handle, replace(REQUEST, streamed=False)) == DELTAS


@pytest.mark.usefixtures("_no_pause")
async def test_nobody_waits_beyond_the_limit_for_a_replica() -> None:
    with pytest.raises(EngineUnavailableError, match="the engine has ended"):
        await collect(FakeHandle([DEAD]), retry_limit_s=0.2)
    with pytest.raises(EngineUnavailableError, match="is gone"):
        await collect(FakeHandle([LOST], [ActorDiedError()]), retry_limit_s=0.2)
