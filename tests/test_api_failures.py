"""Failures before and after a response began, and clients that go (field faults F02, F12, F14)."""

import asyncio
import json
import logging
import pickle
from typing import Any

import openai
import pytest

from app.api.errors import EngineUnavailableError, QueueFullError
from tests.helpers.scripted_api import ScriptedApi
from tests.helpers.scripted_client import delta

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    return {"model": "tiny", **prompt, **fields}


async def read(api: ScriptedApi, path: str, stream: bool, **fields: Any) -> None:
    """Takes a whole answer with the openai client."""
    create = api.openai.chat.completions.create if path == CHAT else api.openai.completions.create
    answer = await create(**body(path), stream=stream, **fields)
    if stream:
        async for _ in answer:
            pass


def failing(error: BaseException, num_steps: int = 0):
    def script(request):
        for step in range(num_steps):
            yield [delta(f"{step}", [step + 10])]
        yield error

    return script


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "error_type", "code"),
    [
        (ValueError("temperature is 9: use less"), 400, "invalid_request_error", None),
        (QueueFullError("16 requests wait already", retry_after_s=2.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (EngineUnavailableError("it is shutting down"), 503, "server_error", "service_unavailable"),
        (RuntimeError("secret"), 500, "server_error", "internal_error"),
        (ConnectionError("secret"), 500, "server_error", "internal_error"),
    ],
)
async def test_an_error_before_the_first_step_has_a_status(path, stream, error, status, error_type, code):
    api = ScriptedApi(failing(error))
    response = await api.post(path, body(path, stream=stream), {"X-Request-Id": "my-id"})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "my-id"
    told = response.json()["error"]
    assert (told["type"], told["code"]) == (error_type, code)
    assert told["param"] == ("temperature" if status == 400 else None)
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    if status == 500:
        assert "my-id" in told["message"]
        assert "secret" not in response.text
    else:
        assert str(error) in told["message"]
    assert api.engine.num_open == 0


async def test_a_fault_is_logged_once_with_its_traceback(caplog):
    with caplog.at_level(logging.WARNING):
        await ScriptedApi(failing(RuntimeError("secret"))).post(TEXT, body(TEXT), {"X-Request-Id": "my-id"})
    (record,) = [record for record in caplog.records if record.name.startswith("app.")]
    assert "my-id" in record.getMessage()
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("secret"), "request id my-id"),
        (ValueError("secret"), "request id my-id"),  # no refusal: the engine had begun
        (EngineUnavailableError("the replica is gone"), "the replica is gone"),
    ],
)
async def test_an_error_in_mid_stream_is_one_event_and_the_end(path, error, message):
    api = ScriptedApi(failing(error, num_steps=3))
    response = await api.post(path, body(path, stream=True), {"X-Request-Id": "my-id"})
    assert response.status_code == 200
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert len(events) == 4, "three chunks, one error, no [DONE]"
    told = json.loads(events[-1].removeprefix("data: "))["error"]
    assert message in told["message"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert len(api.engine.aborted) == 1

    with pytest.raises(openai.APIError, match=message) as caught:
        await read(api, path, stream=True, extra_headers={"X-Request-Id": "my-id"})
    assert caught.value.message == told["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_gives_up_says_why(stream):
    def script(request):
        yield [delta("a", [30])]
        yield [delta("", [], finish="error", error="the logits are NaN at position 7")]

    api = ScriptedApi(script)
    with pytest.raises(openai.APIError, match="NaN at position 7"):
        await read(api, TEXT, stream=stream)


@pytest.mark.parametrize(
    "script",
    [
        lambda request: [[delta("a", [30])], [delta("", [], finish="abort")]],
        lambda request: [[delta("a", [30])]],  # ends without having finished
        lambda request: [],
    ],
    ids=["abort", "unfinished", "nothing"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_never_finished_is_an_error_and_no_answer(script, stream):
    api = ScriptedApi(script)
    with pytest.raises(openai.APIError):
        await read(api, CHAT, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_when_one_prompt_fails_the_others_are_aborted(stream):
    def script(request):
        if request.prompt_token_ids == [7]:
            yield QueueFullError()
        yield asyncio.Event()

    api = ScriptedApi(script)
    response = await api.post(TEXT, {"model": "tiny", "prompt": [[5], [6], [7]], "stream": stream})
    assert response.status_code == 429
    assert len(api.engine.aborted) == 3
    assert api.engine.num_open == 0


def endless(request):
    while True:
        yield [delta("x", [30], index=index) for index in range(request.n)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{}, {"n": 2}], ids=["one", "two"])
async def test_a_client_that_leaves_a_stream_frees_it(path, fields):
    api = ScriptedApi(endless)
    call = api.call(path, body(path, stream=True, **fields))
    for _ in range(10):
        assert (await call.chunk()).startswith(b"data: {")
    await call.hang_up()
    assert len(api.engine.aborted) == 1
    assert api.engine.num_open == 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_frees_its_place(path, stream):
    api = ScriptedApi(lambda request: [asyncio.Event()])
    call = api.call(path, body(path, stream=stream))
    while not api.engine.num_open:
        await asyncio.sleep(0)
    await call.hang_up()
    assert len(api.engine.aborted) == 1
    assert api.engine.num_open == 0
    assert call.status is None


async def test_a_client_that_leaves_before_its_whole_answer_frees_it():
    api = ScriptedApi(endless)
    call = api.call(TEXT, body(TEXT))
    while not api.engine.num_open:
        await asyncio.sleep(0)
    await call.hang_up()
    assert api.engine.num_open == 0


async def test_a_client_that_leaves_several_prompts_frees_them_all():
    api = ScriptedApi(endless)
    call = api.call(TEXT, {"model": "tiny", "prompt": [[5], [6], [7]], "stream": True})
    await call.chunk()
    await call.hang_up()
    assert len(api.engine.aborted) == 3
    assert api.engine.num_open == 0


async def test_a_connection_that_breaks_while_sending_frees_the_request():
    api = ScriptedApi(endless)
    call = api.call(TEXT, body(TEXT, stream=True))
    await call.chunk()
    call.send_fails = True
    await asyncio.wait_for(call.task, 5)
    assert len(api.engine.aborted) == 1


async def test_a_server_that_cancels_the_request_frees_it():
    api = ScriptedApi(endless)
    call = api.call(CHAT, body(CHAT, stream=True))
    await call.chunk()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert len(api.engine.aborted) == 1
    assert api.engine.num_open == 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_no_chunk_waits_for_the_next_step(path):
    gates = [asyncio.Event() for _ in range(3)]

    def script(request):
        yield gates[0]
        yield [delta("a", [30])]
        yield gates[1]
        yield [delta("b", [31])]
        yield gates[2]
        yield [delta("c", [32], finish="stop")]

    call = ScriptedApi(script).call(path, body(path, stream=True))
    await asyncio.sleep(0.01)
    assert not call.has_chunk()
    for gate, text in zip(gates, "abc", strict=True):
        gate.set()
        assert f'"{text}"'.encode() in await call.chunk()
    assert await call.chunk() == b"data: [DONE]\n\n"
    await call.task


async def test_an_error_body_is_readable_whatever_it_quotes():
    api = ScriptedApi(failing(ValueError("stop is '\ud83d': use text")))
    response = await api.post(TEXT, body(TEXT))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "stop is '\\ud83d': use text"


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(QueueFullError("full", retry_after_s=7.0)))
    assert (str(error), error.retry_after_s) == ("full", 7.0)
