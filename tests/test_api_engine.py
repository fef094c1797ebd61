"""The API over a real engine: what the scripted tests assume of deltas holds."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from app.api.model_card import ModelCard
from app.api.router import build_app
from app.async_engine import AsyncEngine
from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine_config import EngineConfig
from tests.helpers.asgi_client import AsgiCall
from tests.helpers.tiny_models import VOCAB_SIZE

PROMPT = "one two three one two three one two"
USER = [{"role": "user", "content": PROMPT}]


class LocalClient:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        async with aclosing(self.engine.generate(request)) as stream:
            async for deltas in stream:
                yield deltas

    async def check_health(self) -> None:
        self.engine.check_health()


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
    engine = await AsyncEngine.create(config, progress=False)
    yield engine
    await asyncio.to_thread(engine.shutdown)


@pytest.fixture
def app(engine, tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    return build_app(LocalClient(engine), ModelCard(("tiny",), 512, VOCAB_SIZE, created=0), tokenizer)


@pytest.fixture
def client(app) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return AsyncOpenAI(base_url="http://testserver/v1", api_key="-", http_client=http, max_retries=0)


async def test_chat_is_the_same_streamed_or_not_with_drafts_or_without(client):
    async def create(**extra):
        body = {"ignore_eos": True, "include_speculation_metrics": True, "return_token_ids": True, **extra}
        return await client.chat.completions.create(
            model="tiny", messages=USER, temperature=0, max_completion_tokens=40, extra_body=body
        )

    drafted, plain = await create(), await create(speculative={"num_speculative_tokens": 0})
    assert drafted.choices[0].token_ids == plain.choices[0].token_ids
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens == 40
    assert plain.usage.prompt_tokens_details.cached_tokens > 0
    assert plain.speculation_metrics["drafted"] == 0
    metrics = drafted.speculation_metrics
    assert metrics["drafted"] > 0
    assert metrics["accepted"] + metrics["steps"] >= 40

    stream = await client.chat.completions.create(
        model="tiny",
        messages=USER,
        temperature=0,
        max_completion_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    token_ids = [token_id for chunk in chunks[:-1] for token_id in chunk.choices[0].token_ids]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert token_ids == drafted.choices[0].token_ids
    assert text == drafted.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 40


async def test_seeded_choices_differ_and_repeat(client):
    async def create(n):
        answer = await client.completions.create(
            model="tiny", prompt=[[7, 8, 9], [20, 21]], n=n, seed=3, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 2 * n * 12
        assert answer.usage.prompt_tokens == 5
        return [choice.text for choice in answer.choices]

    first, again = await create(2), await create(2)
    assert first == again
    assert len(set(first)) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_scores_every_token_of_prompt_and_answer(client, stream):
    fields = {"prompt": PROMPT, "max_tokens": 6, "echo": True, "logprobs": 2, "temperature": 0, "n": 2}
    answer = await client.completions.create(model="tiny", stream=stream, extra_body={"ignore_eos": True}, **fields)
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    for index in range(2):
        own = [choice for choice in choices if choice.index == index]
        text = "".join(choice.text for choice in own)
        parts = [choice.logprobs for choice in own if choice.logprobs is not None]
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        offsets = [offset for part in parts for offset in part.text_offset]
        tops = [top for part in parts for top in part.top_logprobs]
        assert text.startswith(PROMPT)
        assert values[0] is None
        assert all(value < 0 for value in values[1:])
        assert all(len(top) in (2, 3) and token in top for token, top in zip(tokens[1:], tops[1:], strict=True))
        whole = [i for i, token in enumerate(tokens) if not token.startswith("bytes:")]
        assert all(text[offsets[i] :].startswith(tokens[i]) for i in whole if tokens[i][:2] != "<|")


async def test_scores_of_an_echo_do_not_depend_on_the_prefix_cache(client):
    fields = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    first = await client.completions.create(model="tiny", **fields)
    again = await client.completions.create(model="tiny", **fields)
    assert first.choices[0].text == PROMPT
    assert first.usage.completion_tokens == 0
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(first.choices[0].logprobs.token_logprobs[1:])


async def test_logprobs_of_a_chat_join_to_its_text(client):
    answer = await client.chat.completions.create(
        model="tiny",
        messages=USER,
        seed=5,
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 20
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    joined = bytes(byte for entry in content for byte in entry.bytes)
    assert (
        joined.decode(errors="replace")
        .rstrip("\N{REPLACEMENT CHARACTER}")
        .startswith(answer.choices[0].message.content.rstrip("\N{REPLACEMENT CHARACTER}"))
    )


@pytest.mark.parametrize(
    "fields",
    [{"stream": True}, {"stream": False}, {"stream": True, "n": 2}, {"prompt": [[5, 6], [7, 8], [9], [3], [4]]}],
)
async def test_a_client_that_leaves_frees_every_block(app, engine, fields):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, **fields}
    call = AsgiCall(app, "POST", "/v1/completions", body)
    if fields.get("stream"):
        for _ in range(10):
            await call.chunk(timeout_s=30)
    else:
        while not (await engine.stats())["num_running"]:
            await asyncio.sleep(0.001)
    await call.hang_up()
    stats = await engine.stats()  # carried out behind the abort, between two steps
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_aborted"] == (5 if "prompt" in fields else 1)
