"""Streams of deltas, one a prompt: joined, guarded and put in order."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.api.errors import refusal
from app.engine.outputs import SequenceDelta
from app.engine.plan import TokenLogprobs

Deltas = AsyncGenerator[list[SequenceDelta], None]

PromptDeltas = AsyncGenerator[tuple[int, list[SequenceDelta]], None]
"""The deltas of a step, with the number of the prompt that they continue."""


async def with_refusals(stream: Deltas) -> Deltas:
    """A ValueError before the first delta is the engine's refusal; a later one is a fault of ours."""
    started = False
    async with aclosing(stream):
        try:
            async for deltas in stream:
                started = True
                yield deltas
        except ValueError as error:
            if started:
                raise
            raise refusal(error) from error


async def merge(streams: list[Deltas]) -> PromptDeltas:
    """The streams of several prompts as one, in the order in which their deltas come; the first error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for deltas in stream:
                yield 0, deltas
        return

    arrivals: asyncio.Queue[tuple[int, list[SequenceDelta] | None]] = asyncio.Queue()

    async def pump(prompt: int, stream: Deltas) -> None:
        async with aclosing(stream):
            async for deltas in stream:
                arrivals.put_nowait((prompt, deltas))

    pumps = [asyncio.create_task(pump(prompt, stream)) for prompt, stream in enumerate(streams)]
    for prompt, task in enumerate(pumps):
        task.add_done_callback(lambda _, prompt=prompt: arrivals.put_nowait((prompt, None)))  # type: ignore[misc]
    try:
        num_open = len(pumps)
        while num_open:
            prompt, arrived = await arrivals.get()
            if arrived is not None:
                yield prompt, arrived
            else:
                num_open -= 1
                pumps[prompt].result()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def with_prompt_logprobs_first(stream: Deltas) -> Deltas:
    """Holds deltas back until the prompt's logprobs are there, and gives them to every choice's first one."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    held: list[SequenceDelta] = []
    started: set[int] = set()
    async with aclosing(stream):
        async for deltas in stream:
            held += deltas
            for delta in deltas:
                prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
            if prompt_logprobs is None and all(delta.finish_reason not in ("error", "abort") for delta in deltas):
                continue
            for delta in held:
                if delta.index not in started:
                    started.add(delta.index)
                    delta.prompt_logprobs = prompt_logprobs
            yield held
            held = []
    assert not held, "the engine never sent the prompt's logprobs"


async def without_answer(stream: Deltas) -> Deltas:
    """A prompt that is only to be scored (max_tokens 0): the engine draws one token, and it is dropped."""
    async with aclosing(stream):
        async for deltas in stream:
            for delta in deltas:
                delta.text, delta.token_ids, delta.stop_reason = "", [], None
                delta.logprobs = None if delta.logprobs is None else []
                delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
            yield deltas
