"""The whole server: OpenAI's client against `serve run` with a tiny model."""

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.serve_process import ServeProcess

MAX_NUM_SEQS, MAX_QUEUED, MAX_MODEL_LEN = 4, 8, 2048
GREEDY: dict[str, Any] = {"temperature": 0}
PLAIN = {"speculative": {"num_speculative_tokens": 0}}
PROMPT = "the quick brown fox jumps over the lazy dog and then the dog"

pytestmark = [pytest.mark.timeout(240), pytest.mark.cluster]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path]) -> Iterator[ServeProcess]:
    process = ServeProcess(
        {
            "model": str(tiny_checkpoint("llama", max_position_embeddings=MAX_MODEL_LEN)),
            "served_model_name": "tiny",
            "dtype": "float32",
            "max_num_seqs": MAX_NUM_SEQS,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "min_n": 1},
            "deployment_config": {
                "num_replicas": 1,
                "max_queued_requests": MAX_QUEUED,
                "health_check_period_s": 0.5,
                "graceful_shutdown_timeout_s": 5,
            },
        },
        user_config={"num_speculative_tokens": 4},
    )
    process.start()
    yield process
    assert process.stop() == [], "Ctrl-C must leave no process behind"


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as client:
        yield client


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_idle(stats: dict[str, Any]) -> bool:
    return (
        stats["num_open_requests"] == stats["num_running"] == stats["num_waiting"] == 0
        and stats["num_free_blocks"] == stats["num_blocks"]
    )


def endless(n: int = 1, stream: bool = True) -> dict[str, Any]:
    """A body whose answer takes seconds."""
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 1900,
        "n": n,
        "stream": stream,
        "ignore_eos": True,
        "temperature": 1.0,
        **PLAIN,
    }


def test_models_and_health(server: ServeProcess, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_chat_streams_what_it_returns_whole(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "You repeat."}, {"role": "user", "content": PROMPT}]
    fields: Any = {"model": "tiny", "messages": messages, "max_tokens": 40, **GREEDY}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_streams_what_it_returns_whole(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, **GREEDY}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""


def test_speculation_changes_the_speed_and_not_the_text(client: openai.OpenAI) -> None:
    drafted = 0
    for prompt in (PROMPT, "one two three four one two three four one two", "a server answers the request"):
        fields: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 120, **GREEDY}
        metrics: Any = {"include_speculation_metrics": True, "ignore_eos": True}
        drafting = client.completions.create(**fields, extra_body=metrics)
        plain = client.completions.create(**fields, extra_body=metrics | PLAIN)
        assert drafting.choices[0].text == plain.choices[0].text
        counts: Any = drafting.speculation_metrics  # type: ignore[attr-defined]
        assert plain.speculation_metrics["drafted"] == 0  # type: ignore[attr-defined]
        assert plain.speculation_metrics["steps"] == 120  # type: ignore[attr-defined]
        assert counts["steps"] + counts["accepted"] == 120
        drafted += counts["accepted"]
    assert drafted > 0


def test_tokens_arrive_as_they_are_made(client: openai.OpenAI) -> None:
    """G08."""
    start = time.monotonic()
    fields: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 600, "temperature": 1.0}
    extra: Any = {"ignore_eos": True} | PLAIN
    arrivals = [time.monotonic() - start for _ in client.completions.create(**fields, stream=True, extra_body=extra)]
    total = arrivals[-1]
    assert len(arrivals) > 30  # some steps of this tiny model at a time: a delivery each 6 ms at most
    assert arrivals[0] < 0.25 * total
    assert max(later - earlier for earlier, later in itertools.pairwise(arrivals)) < 0.5 * total


def test_the_request_id_is_the_clients(server: ServeProcess) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "my-id-1"})
    assert response.headers.get_list("x-request-id") == ["my-id-1"]
    assert len(httpx.post(f"{server.url}/v1/completions", json=body).headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "tiny", "messages": [', 400),
        (b'["model", "tiny"]', 400),
        (b'{"model": "tiny", "messages": []}', 400),
        (b'{"model": "tiny", "messages": "hello"}', 400),
        (b'{"model": "tiny", "messages": [{"role": "pirate", "content": "arr"}]}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "top_p": 0}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_toknes": 3}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999": 1}}', 400),
        (b'{"model": "huge", "messages": [{"role": "user", "content": "x"}]}', 404),
        (b"\xff\xfe", 400),
        (b"", 400),
    ],
)
def test_a_malformed_body_is_the_clients_fault(server: ServeProcess, body: bytes, status: int) -> None:
    """F15."""
    num_finished = server.stats()["num_finished"]
    response = httpx.post(f"{server.url}/v1/chat/completions", content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]
    stats = server.stats()
    assert is_idle(stats)
    assert stats["num_finished"] == num_finished


@pytest.mark.parametrize("stream", [False, True])
def test_a_huge_prompt_is_refused_with_both_numbers(server: ServeProcess, stream: bool) -> None:
    """F16: before any 200 header."""
    body = {"model": "tiny", "prompt": "one two three " * 20_000, "stream": stream}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"]


def test_a_client_that_leaves_frees_its_sequences(server: ServeProcess) -> None:
    """F12, with two choices."""
    num_aborted = server.stats()["num_aborted"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless(n=2), timeout=30) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(10):
            assert next(lines).startswith("data: ")
        assert server.stats()["num_running"] == 2
    until(lambda: is_idle(server.stats()))
    assert server.stats()["num_aborted"] == num_aborted + 1


def test_a_client_that_leaves_without_streaming_frees_its_sequence(server: ServeProcess) -> None:
    num_aborted = server.stats()["num_aborted"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=endless(stream=False), timeout=httpx.Timeout(10, read=0.3))
    until(lambda: is_idle(server.stats()))
    assert server.stats()["num_aborted"] == num_aborted + 1


async def test_a_hundred_cancelled_requests_leave_nothing(server: ServeProcess) -> None:
    """G10."""
    moments = random.Random(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=30, limits=limits) as client:

        async def ask(delay_s: float, patience_s: float) -> None:
            await asyncio.sleep(delay_s)
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=endless(stream=False)))
            await asyncio.sleep(patience_s)
            task.cancel()
            await asyncio.wait([task])

        await asyncio.gather(*(ask(moments.random(), 0.05 * moments.random()) for _ in range(100)))
    await asyncio.to_thread(until, lambda: is_idle(server.stats()))
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
    assert response.status_code == 200


async def test_overload_is_answered_at_once(server: ServeProcess) -> None:
    """F14: one request of n=6 and 50 more for 4 + 8 places; what does not fit is told so, and may come back."""
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(n: int, stream: bool) -> tuple[httpx.Response, float]:
            start = time.monotonic()
            body = endless(n, stream) | {"max_tokens": 400}
            return await client.post(f"{server.url}/v1/completions", json=body), time.monotonic() - start

        big = asyncio.create_task(ask(6, stream=False))
        await asyncio.to_thread(until, lambda: server.stats()["num_running"] > 0)
        rest = await asyncio.gather(*(ask(1, stream=bool(i % 2)) for i in range(50)))
        answered = [response for response, _ in rest if response.status_code == 200]
        refused = [(response, wait_s) for response, wait_s in rest if response.status_code != 200]
        assert (await big)[0].status_code == 200
    assert 6 <= len(answered) <= 16, "12 places, of which 6 are taken, and some come free in the meantime"
    longest = max(wait_s for response, wait_s in rest if response.status_code == 200)
    for response, wait_s in refused:
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert wait_s < longest
    until(lambda: is_idle(server.stats()))


def test_the_draft_length_changes_while_serving(server: ServeProcess, client: openai.OpenAI) -> None:
    def steps() -> int:
        extra: Any = {"include_speculation_metrics": True, "ignore_eos": True}
        fields: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 100, **GREEDY}
        answer: Any = client.completions.create(**fields, extra_body=extra)
        return answer.speculation_metrics["steps"]

    assert steps() < 100
    num_steps = server.stats()["num_steps"]
    server.deploy({"num_speculative_tokens": 0})
    until(lambda: server.stats()["num_speculative_tokens"] == 0)
    assert steps() == 100
    assert server.stats()["num_steps"] > num_steps, "it is the same replica"
    server.deploy({"num_speculative_tokens": 4})
    until(lambda: server.stats()["num_speculative_tokens"] == 4)
    assert steps() < 100


def test_a_replica_that_dies_is_told_to_its_clients_and_replaced(server: ServeProcess) -> None:
    """G01. The last test: it costs a start."""
    [pid] = server.pids("ServeReplica:default:TargetReplica")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless(), timeout=30) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        last = list(lines)[-1]
    assert time.monotonic() - start < 10
    assert last.startswith("data: {")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "service_unavailable"

    def answers() -> bool:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code in (200, 503)
        return response.status_code == 200

    until(answers, timeout_s=60)
    assert server.pids("ServeReplica:default:TargetReplica") != [pid]
    assert httpx.get(f"{server.url}/health").status_code == 200
