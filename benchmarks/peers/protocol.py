"""How a peer's runner talks to `benchmarks/compare.py`: one line of JSON a message, over stdin and stdout.

The runner loads once and says `{"version": ..., "loaded_s": ...}`; then each `{"prompts": [[token id, ...], ...],
"num_new_tokens": n}` is answered with `{"token_ids": [[...], ...], "wall_s": seconds}`, until stdin ends. Runners live
in the peer's own environment, so this file needs Python alone.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Continues prompts together, greedily, each by so many tokens, past the end of the text."""

Load = Callable[[argparse.Namespace], tuple[str, Generate]]
"""The peer's version and its `Generate`."""


def serve(load: Load, methods: tuple[str, ...] = ("plain",)) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=methods, default="plain")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    options = parser.parse_args()
    answers = _private_stdout()
    start = time.perf_counter()
    version, generate = load(options)
    _answer(answers, {"version": version, "loaded_s": time.perf_counter() - start})
    for line in sys.stdin:
        task = json.loads(line)
        start = time.perf_counter()
        token_ids = generate(task["prompts"], task["num_new_tokens"])
        _answer(answers, {"token_ids": token_ids, "wall_s": time.perf_counter() - start})


def _private_stdout() -> TextIO:
    """Answers alone go to stdout; what libraries print there goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, message: dict) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
