"""`serve run serve_configs/deepseek_mtp.yaml`, as it is, to an OpenAI client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.serve_process import REPOSITORY, ServeProcess

MODEL = "tiny-deepseek-v3"
HELDOUT = json.loads((REPOSITORY / "tests" / "assets" / MODEL / "heldout.json").read_text())
NUM_NEW_TOKENS = 48

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    server = ServeProcess.of_file(Path(REPOSITORY) / "serve_configs" / "deepseek_mtp.yaml")
    server.start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client
    assert server.stop() == [], "Ctrl-C must leave no process behind"


def body(**fields: Any) -> dict[str, Any]:
    extra = {"include_speculation_metrics": True, "ignore_eos": True, **fields}
    return {"model": MODEL, "temperature": 0, "max_tokens": NUM_NEW_TOKENS, "extra_body": extra}


def prompts() -> list[list[int]]:
    return HELDOUT["prompt_ids"][:4]


def test_greedy_text_is_the_same_with_drafts_and_without(client):
    accepted = 0
    for prompt in prompts():
        drafted = client.completions.create(prompt=prompt, **body())
        plain = client.completions.create(prompt=prompt, **body(speculative={"num_speculative_tokens": 0}))
        assert drafted.choices[0].text == plain.choices[0].text != ""
        metrics = drafted.speculation_metrics
        assert plain.speculation_metrics["drafted"] == 0
        assert metrics["steps"] + metrics["accepted"] == NUM_NEW_TOKENS
        assert len(metrics["accepted_per_position"]) == 3
        accepted += metrics["accepted"]
    # By position 0.78, 0.60, 0.48 are accepted: about two tokens of three are drafts.
    assert accepted > len(prompts()) * NUM_NEW_TOKENS * 0.4


def test_a_chat_streams_and_reports_what_was_accepted(client):
    messages = [{"role": "user", "content": "What is the module json?"}]
    stream = client.chat.completions.create(messages=messages, stream=True, **body())
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(messages=messages, **body(speculative={"num_speculative_tokens": 0}))
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].speculation_metrics["accepted"] > 0
    assert len(chunks) < NUM_NEW_TOKENS, "all tokens of a step travel together"
