"""Models, health, the playground, request ids, and paths that do not exist."""

import asyncio
import json
import re

import openai
import pytest

from app.api.model_card import ModelCard
from app.api.router import build_app
from tests.helpers.asgi_client import AsgiCall
from tests.helpers.scripted_api import CARD, ScriptedApi, tiny_tokenizer
from tests.helpers.scripted_client import ScriptedClient, delta

TEXT = {"model": "tiny", "prompt": "hello"}


def hello(request):
    yield [delta("hello", [10], finish="stop")]


@pytest.fixture
def api() -> ScriptedApi:
    return ScriptedApi(hello)


async def test_the_models_are_listed(api):
    models = (await api.openai.models.list()).data
    assert [model.id for model in models] == list(CARD.served_model_names)
    assert models[0].object == "model"
    assert models[0].created == CARD.created
    assert models[0].max_model_len == CARD.max_model_len


@pytest.mark.parametrize("name", CARD.served_model_names)
async def test_a_model_is_found_by_any_of_its_names(api, name):
    assert (await api.http.get(f"/v1/models/{name}")).json()["id"] == name
    answer = await api.openai.completions.create(model=name, prompt="x")
    assert answer.model == name


async def test_an_unknown_model_is_404(api):
    with pytest.raises(openai.NotFoundError) as caught:
        await api.openai.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_a_card_has_a_name():
    with pytest.raises(ValueError, match="served_model_names"):
        ModelCard((), 64, 300, 0)


async def test_health(api):
    response = await api.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    ill = await ScriptedApi(hello, health=RuntimeError("no step for 60 s")).http.get("/health")
    assert ill.status_code == 503
    assert "no step for 60 s" in ill.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/models", 404, "unknown_url"),
        ("POST", "/v1/chat/completion", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_there_is_refused_in_openai_s_form(api, method, path, status, code):
    response = await api.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert f"{method} {path}" in error["message"]
    assert "x-request-id" in response.headers
    assert ("allow" in response.headers) is (status == 405)


async def test_a_path_of_any_characters_is_answered(api):
    response = await api.http.get("/v1/models/%ed%a0%bd%00ä")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_request_id_is_taken(api):
    response = await api.post("/v1/completions", TEXT, {"X-Request-Id": "my-id.1:2_3"})
    assert response.headers["x-request-id"] == "my-id.1:2_3"
    assert response.json()["id"] == "cmpl-my-id.1:2_3"
    assert api.engine.requests[0].request_id.startswith("cmpl-my-id.1:2_3-")


@pytest.mark.parametrize("given", ["", "with space", "x" * 129, "ünicode".encode("latin-1"), "a/b"])
async def test_a_strange_request_id_is_replaced(api, given):
    response = await api.http.post("/v1/completions", json=TEXT, headers={"X-Request-Id": given})
    request_id = response.headers["x-request-id"]
    assert len(request_id) == 32
    assert request_id.isalnum()
    assert response.json()["id"] == f"cmpl-{request_id}"


async def test_every_response_has_a_request_id_of_its_own(api):
    responses = [
        await api.http.get("/v1/models"),
        await api.http.get("/health"),
        await api.http.get("/nowhere"),
        await api.post("/v1/completions", b"{"),
        await api.post("/v1/completions", {**TEXT, "stream": True}),
    ]
    assert len({response.headers["x-request-id"] for response in responses}) == len(responses)


async def test_two_requests_with_one_id_are_two_to_the_engine(api):
    for _ in range(2):
        await api.post("/v1/completions", TEXT, {"X-Request-Id": "same"})
    first, second = api.engine.requests
    assert first.request_id != second.request_id


async def test_the_header_may_be_left_to_the_server_in_front():
    app = build_app(ScriptedClient(hello), CARD, tiny_tokenizer(), echo_request_id=False)
    sent = []

    async def send(message):
        sent.append(message)

    received = iter([{"type": "http.request", "body": json.dumps(TEXT).encode(), "more_body": False}])

    async def receive():
        message = next(received, None)
        return message if message is not None else await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    await app(scope | {"headers": [(b"x-request-id", b"theirs")]}, receive, send)
    assert sent[0]["status"] == 200
    assert b"x-request-id" not in dict(sent[0]["headers"])
    assert json.loads(sent[1]["body"])["id"] == "cmpl-theirs"


async def test_a_fault_outside_the_engine_is_a_500_without_a_traceback(api, monkeypatch):
    def broken(*args: object) -> None:
        raise ValueError("secret")

    monkeypatch.setattr("app.api.endpoints.Responder", broken)
    response = await api.post("/v1/completions", TEXT, {"X-Request-Id": "my-id"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "my-id"
    assert "my-id" in response.json()["error"]["message"]
    assert "secret" not in response.text


async def test_a_client_that_leaves_while_it_sends_its_body_is_no_fault(api, caplog):
    call = AsgiCall(api.app, "POST", "/v1/completions", b"{", more_body=True)
    await asyncio.sleep(0)
    await call.hang_up()
    assert api.engine.requests == []
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_the_bodies_are_described(api):
    paths = (await api.http.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "speculative", "include_speculation_metrics"} <= schema["properties"].keys()
    assert "$ref" not in json.dumps(schema)


async def test_the_playground_is_one_page_without_anything_from_elsewhere(api):
    response = await api.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = response.text
    assert re.findall(r"https?://", page) == []
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "default-src 'none'" in page
    for path in re.findall(r'fetch\("([^"]*)"', page):
        assert (await api.http.get(f"/{path}")).status_code in (200, 405)


async def test_what_the_playground_reads_of_a_stream(api):
    body = {
        "model": (await api.http.get("/v1/models")).json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "return_token_ids": True,
        "include_speculation_metrics": True,
        "temperature": 0,
        "max_completion_tokens": 8,
        "speculative": {"num_speculative_tokens": 0},
    }
    events = (await api.post("/v1/chat/completions", body)).text.split("\n\n")
    chunk = json.loads(events[0].removeprefix("data: "))
    assert chunk["choices"][0]["token_ids"] == [10]
    assert chunk["choices"][0]["delta"]["content"] == "hello"
    assert {"mean_acceptance_length", "drafted", "accepted", "acceptance_rate"} <= chunk["speculation_metrics"].keys()
