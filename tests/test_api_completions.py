"""Plain completions through the openai client: prompts of every form, echo, logprobs."""

from typing import Any

import pytest

from tests.helpers.scripted_api import ScriptedApi
from tests.helpers.scripted_client import delta, logprob, speculation_stats


def quick_fox(request):
    yield [delta("the", [20], cached=4)]
    yield [delta(" quick fox", [21, 22, 23], finish="length", stats=speculation_stats((0, 0), (3, 2)))]


def tail_of_prompt(request):
    """Answers with the prompt's last id, so that a test sees which prompt a choice continues."""
    last = request.prompt_token_ids[-1]
    for index in range(request.n):
        yield [delta(f"<{last}", [last], index=index)]
    for index in range(request.n):
        yield [delta(f".{index}>", [index], index=index, finish="stop")]


async def create(api: ScriptedApi, **fields: Any) -> Any:
    return await api.openai.completions.create(**{"model": "tiny", "prompt": "hello", **fields})


async def chunks_of(api: ScriptedApi, **fields: Any) -> list[Any]:
    return [chunk async for chunk in await create(api, stream=True, **fields)]


async def test_a_whole_completion():
    api = ScriptedApi(quick_fox)
    answer = await create(api)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason) == ("the quick fox", 0, "length")
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(api.ids("hello"))
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert api.engine.requests[0].prompt_token_ids == api.ids("hello")
    assert api.engine.requests[0].sampling_params.max_tokens == 16


async def test_a_streamed_completion():
    api = ScriptedApi(quick_fox)
    chunks = await chunks_of(api, stream_options={"include_usage": True})
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["the", " quick fox"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == (await create(api)).usage
    assert {chunk.object for chunk in chunks} == {"text_completion"}


async def test_speculation_metrics():
    extra_body = {"include_speculation_metrics": True}
    answer = await create(ScriptedApi(quick_fox), extra_body=extra_body)
    assert (answer.speculation_metrics["drafted"], answer.speculation_metrics["accepted"]) == (3, 2)
    chunks = await chunks_of(ScriptedApi(quick_fox), extra_body=extra_body)
    assert chunks[-1].speculation_metrics == answer.speculation_metrics


@pytest.mark.parametrize(
    ("prompt", "last_ids"),
    [
        ([5, 6, 7], [7]),
        ([[5, 6], [7], [8, 9]], [6, 7, 9]),
        ("hello", None),
        (["hello", "the fox", "!"], None),
    ],
)
async def test_prompts_of_every_form_have_choices_in_their_order(prompt, last_ids):
    api = ScriptedApi(tail_of_prompt)
    if last_ids is None:
        last_ids = [api.ids(text)[-1] for text in ([prompt] if isinstance(prompt, str) else prompt)]
    answer = await create(api, prompt=prompt, n=2)
    expected = [f"<{last}.{index}>" for last in last_ids for index in (0, 1)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.completion_tokens == 2 * len(expected)
    assert answer.usage.prompt_tokens == sum(len(request.prompt_token_ids) for request in api.engine.requests)
    assert len({request.request_id for request in api.engine.requests}) == len(last_ids)

    chunks = await chunks_of(api, prompt=prompt, n=2, stream_options={"include_usage": True})
    texts = [""] * len(expected)
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    finishes = [chunk.choices[0].index for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert sorted(finishes) == list(range(len(expected)))
    assert chunks[-1].usage == answer.usage


async def test_echo_repeats_the_prompt():
    api = ScriptedApi(quick_fox)
    assert (await create(api, echo=True)).choices[0].text == "hellothe quick fox"
    assert (await create(api, echo=True, prompt=api.ids("a fox"))).choices[0].text == "a foxthe quick fox"
    chunks = await chunks_of(api, echo=True)
    assert [chunk.choices[0].text for chunk in chunks] == ["hellothe", " quick fox"]
    assert api.engine.requests[0].sampling_params.prompt_logprobs is None
    assert (await create(api, echo=True)).usage.completion_tokens == 4


def scored(request):
    """The prompt's logprobs are -1, -2, …; the answer's -0.5; both have the token 40 beside them."""
    ids = request.prompt_token_ids
    prompt_logprobs = [None, *(logprob(ids[i], -float(i), ((40, -0.25),), rank=2) for i in range(1, len(ids)))]
    yield [delta("the", [20], logprobs=[logprob(20)], prompt_logprobs=prompt_logprobs)]
    yield [delta(" fox", [21, 22], logprobs=[logprob(21), logprob(22, -0.75, ((40, -0.25),))], finish="stop")]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(stream):
    api = ScriptedApi(scored)
    prompt = "a quick fox"
    ids = api.ids(prompt)
    pieces = [api.tokenizer.decode([token_id]) for token_id in [*ids, 20, 21, 22]]
    fields = {"prompt": prompt, "echo": True, "logprobs": 1}
    parts = (
        [chunk.choices[0].logprobs for chunk in await chunks_of(api, **fields)]
        if stream
        else [(await create(api, **fields)).choices[0].logprobs]
    )
    assert api.engine.requests[0].sampling_params.prompt_logprobs == 1

    tokens = [token for part in parts for token in part.tokens]
    token_logprobs = [value for part in parts for value in part.token_logprobs]
    top_logprobs = [top for part in parts for top in part.top_logprobs]
    text_offset = [offset for part in parts for offset in part.text_offset]
    assert tokens == pieces
    assert token_logprobs == [None, *(-float(i) for i in range(1, len(ids))), -0.5, -0.5, -0.75]
    fortieth = api.tokenizer.decode([40])
    assert top_logprobs[0] is None
    assert top_logprobs[1] == {fortieth: -0.25, pieces[1]: -1.0}
    assert top_logprobs[-1] == {fortieth: -0.25, pieces[-1]: -0.75}
    assert text_offset == [len("".join(pieces[:i])) for i in range(len(pieces))]


async def test_every_choice_of_an_echo_is_scored_even_if_it_starts_before_the_scores_are_there():
    def script(request):
        ids = request.prompt_token_ids
        yield [delta("b", [31], index=1, logprobs=[logprob(31)])]
        yield [
            delta("a", [30], index=0, logprobs=[logprob(30)], prompt_logprobs=[None, *map(logprob, ids[1:])]),
            delta("b", [31], index=1, logprobs=[logprob(31)], finish="stop"),
        ]
        yield [delta("a", [30], index=0, logprobs=[logprob(30)], finish="stop")]

    api = ScriptedApi(script)
    answer = await create(api, n=2, echo=True, logprobs=0)
    num_prompt = len(api.ids("hello"))
    assert [choice.text for choice in answer.choices] == ["helloaa", "hellobb"]
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [num_prompt + 2] * 2
    chunks = await chunks_of(api, n=2, echo=True, logprobs=0)
    for index, text in ((0, "helloaa"), (1, "hellobb")):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == text
        assert sum(len(choice.logprobs.tokens) for choice in own) == num_prompt + 2


async def test_offsets_of_split_characters_and_special_tokens():
    api = ScriptedApi(lambda request: script)
    fox = api.ids("🦊")
    ids = [*api.ids("a"), *fox, 1, *api.ids("b")]  # 1 is a special token: not in the text
    script = [[delta("a🦊b", ids, logprobs=[logprob(token_id) for token_id in ids], finish="stop")]]
    logprobs = (await create(api, logprobs=0)).choices[0].logprobs
    assert logprobs.text_offset == [0, 1, 1, 1, 1, 2, 2]
    assert logprobs.tokens == [
        "a",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\xa6",
        "bytes:\\x8a",
        "<|im_start|>",
        "b",
    ]
    assert logprobs.top_logprobs[1] == {"bytes:\\xf0": -0.5}


async def test_a_prompt_of_half_a_character_does_not_leak_into_the_answer():
    api = ScriptedApi(lambda request: [[delta("!", [30], finish="stop")]])
    prompt = api.ids("hello 🦊")[:-2]
    assert (await create(api, prompt=prompt)).choices[0].text == "!"
    assert [chunk.choices[0].text for chunk in await chunks_of(api, prompt=prompt)] == ["!"]
    echoed = (await create(api, prompt=prompt, echo=True)).choices[0].text
    assert echoed.startswith("hello ")
    assert echoed.endswith("!")
    assert api.engine.requests[0].prompt_token_ids == prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_at_all_only_scores_the_prompt(stream):
    api = ScriptedApi(scored)
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
    if stream:
        chunks = await chunks_of(api, stream_options={"include_usage": True}, **fields)
        choices, usage = [chunk.choices[0] for chunk in chunks[:-1]], chunks[-1].usage
    else:
        answer = await create(api, **fields)
        choices, usage = answer.choices, answer.usage
    assert "".join(choice.text for choice in choices) == "hello"
    assert choices[-1].finish_reason == "length"
    assert sum(len(choice.logprobs.tokens) for choice in choices if choice.logprobs) == len(api.ids("hello"))
    assert usage.completion_tokens == 0
    assert api.engine.requests[0].sampling_params.max_tokens == 1


async def test_prompt_logprobs_are_in_their_choice():
    api = ScriptedApi(scored)
    answer = await create(api, prompt=[[10, 11], [12, 13, 14]], extra_body={"prompt_logprobs": 1})
    assert [len(choice.prompt_logprobs) for choice in answer.choices] == [2, 3]
    assert answer.choices[1].prompt_logprobs[2]["14"]["logprob"] == -2.0
    assert answer.choices[0].logprobs is None


async def test_special_tokens_are_added_unless_refused():
    api = ScriptedApi(quick_fox)
    calls: list[bool] = []
    encode = type(api.tokenizer).encode

    def recorded(self, text, *, add_special_tokens, **options):
        calls.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(api.tokenizer), "encode", recorded)
        await create(api)
        await create(api, extra_body={"add_special_tokens": False})
    assert calls == [True, False]
