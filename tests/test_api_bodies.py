"""Bodies that are refused, and that none of them reaches the engine (field faults F08, F15, F16)."""

import json
from typing import Any

import pytest

from app.api.model_card import ModelCard
from tests.helpers.scripted_api import CARD, ScriptedApi
from tests.helpers.scripted_client import delta

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}


def hello(request):
    yield [delta("hello", [10], finish="stop")]


@pytest.fixture
def api() -> ScriptedApi:
    return ScriptedApi(hello)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [USER], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", **fields}


async def refused(api: ScriptedApi, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = await api.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert api.engine.requests == []
    return error


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "tiny", "prompt": "x"', b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "brace", "cut", "array", "null", "string", "not UTF-8", "deep"],
)
async def test_what_is_not_a_json_object_is_refused(api, path, body):
    error = await refused(api, path, body)
    assert "JSON" in error["message"]


async def test_a_lone_surrogate_is_refused_with_a_body_that_can_be_read(api):
    await refused(api, TEXT, b'{"model": "tiny", "prompt": "\\ud83d"}')
    await refused(api, CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}]}')


CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"moderation": {}}, "moderation"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
]

TEXT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["x", 3]}, "prompt"),
    ({"prompt": [3, "x"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[1], "x"]}, "prompt"),
    ({"prompt": [1, 300]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt"),
    ({"prompt": ["x"] * 2049}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"messages": []}, "messages"),
]

COMMON_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x", 3]}, "stop[1]"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "x"}, "bad_words"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": "True"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"k": 3}}, "speculative.k"),
    ({"speculative": 3}, "speculative"),
    ({"include_speculation_metrics": "yes"}, "include_speculation_metrics"),
    ({"user": 3}, "user"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_FAULTS + COMMON_FAULTS)
async def test_a_chat_body_is_refused_with_the_field_at_fault(api, fields, param):
    error = await refused(api, CHAT, json.dumps(chat(**fields)).encode())
    assert error["param"] == param
    assert param.split(".")[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize(("fields", "param"), TEXT_FAULTS + COMMON_FAULTS)
async def test_a_completion_body_is_refused_with_the_field_at_fault(api, fields, param):
    error = await refused(api, TEXT, json.dumps(text(**fields)).encode())
    assert error["param"] == param
    assert param.split(".")[-1].split("[")[0] in error["message"]


async def test_unknown_fields_are_refused_as_openai_does(api):
    one = await refused(api, CHAT, chat(tempreature=1))
    assert one["message"] == "Unrecognized request argument supplied: tempreature"
    two = await refused(api, TEXT, text(foo=1, bar=None))
    assert two["message"] == "Unrecognized request arguments supplied: foo, bar"


async def test_a_refused_value_is_quoted_but_not_at_length(api):
    error = await refused(api, CHAT, chat(temperature="hot"))
    assert "'hot'" in error["message"]
    error = await refused(api, CHAT, chat(temperature="h" * 1_000_000))
    assert len(error["message"]) < 500


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unknown_model_is_404(api, path):
    body = chat(model="gpt-9") if path == CHAT else text(model="gpt-9")
    error = await refused(api, path, body, status=404)
    assert error["code"] == "model_not_found"
    assert "gpt-9" in error["message"]
    assert "`tiny`" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("bias", "entry"),
    [
        ({"999999": -100}, "999999"),
        ({"-1": 1}, "-1"),
        ({"AI": -100}, "'AI'"),
        ({" 5": 1}, "' 5'"),
        ({"5.0": 1}, "'5.0'"),
        ({"٥": 1}, "'٥'"),
        ({"9" * 5000: 1}, "999"),
        ({"5": float("nan")}, "[5]"),
        ({"5": 1e9}, "[5]"),
        ({"5": -100.5}, "[5]"),
    ],
)
async def test_a_bad_logit_bias_names_its_entry(api, path, bias, entry):
    body = chat(logit_bias=bias) if path == CHAT else text(logit_bias=bias)
    error = await refused(api, path, json.dumps(body).encode())
    assert error["param"] == "logit_bias"
    assert entry in error["message"]
    assert (await api.post(path, chat() if path == CHAT else text())).status_code == 200


async def test_a_logit_bias_of_the_wrong_type_names_its_entry(api):
    error = await refused(api, CHAT, chat(logit_bias={"5": "much"}))
    assert error["param"] == "logit_bias.5"
    assert (await refused(api, CHAT, chat(logit_bias=[5])))["param"] == "logit_bias"


async def test_a_thousand_biases_are_no_fault():
    api = ScriptedApi(hello, card=ModelCard(("tiny",), 64, vocab_size=2000, created=0))
    response = await api.post(CHAT, chat(logit_bias={str(i): -1 for i in range(1000)}))
    assert response.status_code == 200
    assert len(api.engine.requests[0].sampling_params.logit_bias) == 1000


@pytest.mark.parametrize(("path", "required"), [(CHAT, chat()), (TEXT, text())])
async def test_an_explicit_null_is_the_default(api, path, required):
    schema = api.app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    nulls = {name: None for name in schema["properties"] if name not in required}
    assert len(nulls) > 25
    assert (await api.post(path, required)).status_code == 200
    assert (await api.post(path, required | nulls)).status_code == 200
    default, explicit = api.engine.requests
    assert explicit.sampling_params == default.sampling_params
    assert (explicit.n, explicit.prompt_token_ids) == (default.n, default.prompt_token_ids)


async def test_a_null_prompt_begins_a_new_document(api):
    await api.post(TEXT, {"model": "tiny", "prompt": None})
    await api.post(TEXT, {"model": "tiny", "prompt": ""})
    assert [request.prompt_token_ids for request in api.engine.requests] == [[1], [1]]


async def test_nulls_inside_are_defaults_too(api):
    body = chat(
        messages=[{**USER, "name": None}, {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}],
        stream=True,
        stream_options={"include_usage": None, "include_obfuscation": None},
        speculative={"num_speculative_tokens": None},
    )
    assert (await api.post(CHAT, body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "total"), [(64, None, 65), (200, None, 201), (60, 5, 65), (10, 1000, 1010)]
)
async def test_what_the_context_cannot_hold_is_refused_with_both_numbers(api, stream, num_prompt, max_tokens, total):
    prompt = [10] * num_prompt
    body = text(prompt=prompt, max_tokens=1 if max_tokens is None else max_tokens, stream=stream)
    error = await refused(api, TEXT, body)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert f"{CARD.max_model_len} tokens" in error["message"]
    assert f"{total} tokens" in error["message"]


async def test_a_chat_that_the_context_cannot_hold_is_refused(api):
    error = await refused(api, CHAT, chat(messages=[{"role": "user", "content": "x" * 100}], stream=True))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    error = await refused(api, CHAT, chat(max_completion_tokens=64))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_what_just_fits_is_accepted(api):
    assert (await api.post(TEXT, text(prompt=[10] * 63))).status_code == 200
    assert (await api.post(TEXT, text(prompt=[10] * 60, max_tokens=4))).status_code == 200
    assert [request.sampling_params.max_tokens for request in api.engine.requests] == [1, 4]


async def test_megabytes_are_refused_without_being_tokenised(api, monkeypatch):
    def encode(*args: object, **kwargs: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(api.tokenizer), "encode", encode)
    error = await refused(api, TEXT, text(prompt="word " * 1_000_000))
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]
    error = await refused(api, CHAT, chat(messages=[{"role": "user", "content": "word " * 1_000_000}]))
    assert error["code"] == "context_length_exceeded"


async def test_a_body_above_the_limit_is_413(api, monkeypatch):
    monkeypatch.setattr("app.api.endpoints.MAX_BODY_BYTES", 1000)
    error = await refused(api, TEXT, text(prompt="x" * 1000), status=413)
    assert "1000 bytes" in error["message"]
