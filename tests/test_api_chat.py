"""Chat completions through the openai client: text, roles, usage, logprobs, templates."""

import copy
import json
import threading
from typing import Any

import openai
import pytest

from app.api.model_card import ModelCard
from tests.helpers.scripted_api import ScriptedApi, tiny_tokenizer
from tests.helpers.scripted_client import delta, logprob, speculation_stats
from tests.helpers.tiny_models import VOCAB_SIZE

USER = {"role": "user", "content": "hello"}


def quick_fox(request):
    """Three steps: one token, three at once (two accepted drafts), an end without text."""
    yield [delta("the", [20], cached=16)]
    yield [delta(" quick fox", [21, 22, 23])]
    yield [delta(".", [24], finish="stop", stats=speculation_stats((0, 0), (4, 2), (2, 0)))]


def two_choices(request):
    """The second ends first, in the middle of the other's run."""
    yield [delta("a", [30], index=0, cached=16), delta("b", [31], index=1, cached=48)]
    yield [
        delta("aa", [30, 30], index=0),
        delta("bb", [31, 31], index=1, finish="length", stats=speculation_stats((1, 1))),
    ]
    yield [delta("aaa", [30, 30, 30], index=0, finish="stop", stats=speculation_stats((2, 1)))]


async def create(api: ScriptedApi, **fields: Any) -> Any:
    return await api.openai.chat.completions.create(**{"model": "tiny", "messages": [USER], **fields})


async def chunks_of(api: ScriptedApi, **fields: Any) -> list[Any]:
    return [chunk async for chunk in await create(api, stream=True, **fields)]


async def test_a_whole_answer():
    api = ScriptedApi(quick_fox)
    answer = await create(api)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.created > 1_700_000_000
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "the quick fox.")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    num_prompt_tokens = len(api.engine.requests[0].prompt_token_ids)
    assert answer.usage.prompt_tokens == num_prompt_tokens > 0
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == num_prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert "speculation_metrics" not in answer.model_extra


async def test_a_streamed_answer_sends_a_step_as_one_chunk():
    chunks = await chunks_of(ScriptedApi(quick_fox))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["the", " quick fox", "."]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_the_wire_format_of_a_stream():
    response = await ScriptedApi(quick_fox).post(
        "/v1/chat/completions", {"model": "tiny", "messages": [USER], "stream": True}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len(chunks) == 3
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[1]["choices"] == [
        {"index": 0, "delta": {"content": " quick fox"}, "logprobs": None, "finish_reason": None}
    ]


async def test_usage_comes_in_one_last_chunk_where_asked():
    api = ScriptedApi(quick_fox)
    chunks = await chunks_of(api, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks[:-1]] == [None, None, None]
    assert all("usage" in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == (await create(api)).usage


@pytest.mark.parametrize("options", [{"include_usage": False}, {}, None])
async def test_no_usage_chunk_unless_asked(options):
    chunks = await chunks_of(ScriptedApi(quick_fox), stream_options=options)
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in chunks)


async def test_choices_are_told_apart_and_their_tokens_summed():
    api = ScriptedApi(two_choices)
    answer = await create(api, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == ["aaaaaa", "bbb"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens == len(api.engine.requests[0].prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert [request.n for request in api.engine.requests] == [2]


async def test_choices_interleave_in_a_stream():
    chunks = await chunks_of(ScriptedApi(two_choices), n=2, stream_options={"include_usage": True})
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])
    assert [chunk.choices[0].index for chunk in chunks[:-1]] == [0, 1, 0, 1, 0]
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", "assistant", None, None, None]
    for index, text, finish in ((0, "aaaaaa", "stop"), (1, "bbb", "length")):
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(choice.delta.content for choice in own) == text
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [finish]
    assert chunks[-1].usage.completion_tokens == 9


async def test_speculation_metrics_where_asked():
    answer = await create(ScriptedApi(quick_fox), extra_body={"include_speculation_metrics": True})
    assert answer.speculation_metrics == {
        "drafted": 6,
        "accepted": 2,
        "drafted_per_position": [2, 2, 1, 1],
        "accepted_per_position": [1, 1, 0, 0],
        "steps": 3,
        "acceptance_rate": pytest.approx(1 / 3),
        "mean_acceptance_length": pytest.approx(5 / 3),
    }


@pytest.mark.parametrize("include_usage", [False, True])
async def test_speculation_metrics_are_in_the_last_chunk_of_a_stream(include_usage):
    chunks = await chunks_of(
        ScriptedApi(two_choices),
        n=2,
        stream_options={"include_usage": include_usage},
        extra_body={"include_speculation_metrics": True},
    )
    assert all("speculation_metrics" not in chunk.model_extra for chunk in chunks[:-1])
    assert chunks[-1].speculation_metrics["drafted"] == 3
    assert chunks[-1].speculation_metrics["accepted"] == 2
    assert (chunks[-1].choices == []) is include_usage


async def test_held_back_text_makes_no_chunk_of_its_own():
    def script(request):
        yield [delta("", [40])]  # the first chunk brings the role, whatever it says
        yield [delta("", [41])]
        yield [delta("🦊", [42, 43])]
        yield [delta("", [], finish="length")]

    chunks = await chunks_of(ScriptedApi(script))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "🦊", None]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (await create(ScriptedApi(script))).choices[0].message.content == "🦊"


async def test_logprobs_carry_the_bytes_of_split_characters():
    api = ScriptedApi(lambda request: script)
    first, rest = api.ids("🦊")[:2], api.ids("🦊")[2:]
    assert len(first + rest) == 4, "the tiny vocabulary has no token for a fox"
    (word,) = api.ids(" the")
    script = [
        [delta("", first, logprobs=[logprob(token_id, -0.1, ((word, -0.2),)) for token_id in first])],
        [delta("🦊", rest, logprobs=[logprob(token_id) for token_id in rest])],
        [
            delta(
                " the", [word], logprobs=[logprob(word, float("-inf"), ((word, -0.7), (first[0], -1.5)))], finish="stop"
            )
        ],
    ]
    answer = await create(api, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "🦊 the"
    assert [entry.token for entry in content] == ["\\xf0", "\\x9f", "\\xa6", "\\x8a", " the"]
    assert content[0].logprob == -0.1
    assert [(top.token, top.bytes, top.logprob) for top in content[0].top_logprobs] == [(" the", list(b" the"), -0.2)]
    assert content[-1].logprob == -9999.0
    assert [top.logprob for top in content[-1].top_logprobs] == [-0.7, -1.5]

    chunks = await chunks_of(api, logprobs=True, top_logprobs=2)
    assert len(chunks) == 3, "logprobs of held back tokens are not held back"
    assert [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content] == content
    assert api.engine.requests[0].sampling_params.logprobs == 2


async def test_logprobs_without_alternatives():
    api = ScriptedApi(lambda request: [[delta("a", [30], logprobs=[logprob(30)], finish="stop")]])
    answer = await create(api, logprobs=True)
    assert answer.choices[0].logprobs.content[0].top_logprobs == []
    assert api.engine.requests[0].sampling_params.logprobs == 0


FIELDS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": -7,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


async def test_parameters_reach_the_engine():
    api = ScriptedApi(lambda request: [[delta("", [1], index=index, finish="stop") for index in range(request.n)]])
    body = {
        **FIELDS,
        "model": "tiny",
        "messages": [USER],
        "n": 3,
        "stop": "END",
        "logit_bias": {"5": -100, "6": 2},
        "max_completion_tokens": 9,
        "bad_words": ["fox", "the"],
        "speculative": {"num_speculative_tokens": 0},
        # Accepted, without a bearing on the answer.
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    assert (await api.post("/v1/chat/completions", body)).status_code == 200
    (request,) = api.engine.requests
    params = request.sampling_params
    assert {name: getattr(params, name) for name in FIELDS} == FIELDS
    assert request.n == 3
    assert params.stop == ["END"]
    assert params.logit_bias == {5: -100, 6: 2}
    assert params.max_tokens == 9
    assert params.num_speculative_tokens == 0
    words = ("fox", " fox", "the", " the")
    assert sorted(params.bad_words_token_ids) == sorted(api.ids(word) for word in words)


async def test_an_answer_without_a_limit_may_fill_the_context():
    api = ScriptedApi(quick_fox)
    await create(api)
    params = api.engine.requests[0].sampling_params
    assert params.max_tokens is None
    assert params.temperature == 1.0
    assert params.num_speculative_tokens is None


async def test_top_k_of_minus_one_is_off():
    api = ScriptedApi(quick_fox)
    await create(api, extra_body={"top_k": -1})
    assert api.engine.requests[0].sampling_params.top_k == 0


async def prompt_of(api: ScriptedApi, messages: list[dict[str, Any]], **extra: Any) -> str:
    await create(api, messages=messages, extra_body=extra)
    return api.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


async def test_the_checkpoint_s_template_writes_the_prompt():
    messages = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        USER,
    ]
    prompt = await prompt_of(ScriptedApi(quick_fox), messages)
    assert prompt == (
        "<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_answer_may_be_sent_back_as_it_came():
    api = ScriptedApi(quick_fox)
    answer = await create(api)
    prompt = await prompt_of(api, [USER, answer.choices[0].message, USER])
    assert "assistant\nthe quick fox.<|im_end|>" in prompt
    everything = answer.choices[0].message.model_dump()
    assert prompt == await prompt_of(api, [USER, everything, USER])


async def test_the_last_message_may_be_continued():
    messages = [USER, {"role": "assistant", "content": "the fox"}]
    assert (await prompt_of(ScriptedApi(quick_fox), messages, continue_final_message=True)).endswith("the fox")
    prompt = await prompt_of(ScriptedApi(quick_fox), messages, add_generation_prompt=False)
    assert prompt.endswith("the fox<|im_end|>\n")


def with_template(template: str | None) -> ScriptedApi:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return ScriptedApi(quick_fox, tokenizer=tokenizer)


async def test_developers_are_the_system_where_the_template_does_not_know_them():
    messages = [{"role": "developer", "content": "x"}]
    assert (await prompt_of(ScriptedApi(quick_fox), messages)).startswith("<|im_start|>system")
    knowing = with_template("{% for m in messages %}{{ m.role + ('!' if m.role == 'developer' else '') }}{% endfor %}")
    assert await prompt_of(knowing, messages) == "developer!"


async def test_template_variables():
    api = with_template("{{ mood }} {{ reasoning_effort }} {{ messages[0].name }}")
    messages = [{**USER, "name": "Ann"}]
    assert (
        await prompt_of(api, messages, chat_template_kwargs={"mood": "good"}, reasoning_effort="low") == "good low Ann"
    )


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 1 + 'x' }}", "unsupported operand"),
        ("{% if %}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
async def test_a_template_that_cannot_write_the_prompt_is_the_client_s_error(template, sentence):
    api = with_template(template)
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        await create(api)
    assert caught.value.param == "messages"
    assert api.engine.requests == []


async def test_prompt_logprobs():
    def script(request):
        ids = request.prompt_token_ids
        prompt_logprobs = [None, *(logprob(token_id, -2.0, ((30, -0.25), (31, -0.5)), rank=9) for token_id in ids[1:])]
        yield [delta("a", [30], finish="stop", prompt_logprobs=prompt_logprobs)]

    api = ScriptedApi(script)
    answer = await create(api, extra_body={"prompt_logprobs": 2})
    ids = api.engine.requests[0].prompt_token_ids
    assert api.engine.requests[0].sampling_params.prompt_logprobs == 2
    assert len(answer.prompt_logprobs) == len(ids)
    assert answer.prompt_logprobs[0] is None
    entry = answer.prompt_logprobs[1]
    assert entry[str(ids[1])] == {"logprob": -2.0, "rank": 9, "decoded_token": api.tokenizer.decode([ids[1]])}
    assert entry["31"]["rank"] == 2


async def test_token_ids_and_stop_reasons():
    api = ScriptedApi(lambda request: [[delta("a", [30])], [delta("b", [31], finish="stop", stop_reason="END")]])
    answer = await create(api, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [30, 31]
    assert answer.choices[0].stop_reason == "END"
    chunks = await chunks_of(api, extra_body={"return_token_ids": True})
    assert [chunk.choices[0].token_ids for chunk in chunks] == [[30], [31]]
    plain = await create(api)
    assert "token_ids" not in plain.choices[0].model_extra


async def test_long_prompts_leave_the_event_loop_alone(monkeypatch):
    threads: list[str] = []
    tokenizer = tiny_tokenizer()
    encode = type(tokenizer).encode

    def recorded(self, *args, **kwargs):
        threads.append(threading.current_thread().name)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", recorded)
    api = ScriptedApi(quick_fox, card=ModelCard(("tiny",), 100_000, VOCAB_SIZE, created=0))
    await create(api)
    await create(api, messages=[{"role": "user", "content": "hello " * 1000}])
    await api.openai.completions.create(model="tiny", prompt=["hello"] * 100)
    short, *long = threads
    assert short == threading.main_thread().name
    assert len(long) == 101
    assert short not in long
