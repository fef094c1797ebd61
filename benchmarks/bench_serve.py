"""Measures a running server over HTTP, with as many streaming clients at once as a workload has streams.

    python benchmarks/bench_serve.py --url http://127.0.0.1:8000

Every workload runs with the server's drafts and, unless --no-extensions is given, with drafting turned off for the
request, alternately, round by round. Each request begins with a token of its own, so that no prefix cache helps.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.http_client import CompletionClient, StreamResult, first_model
from benchmarks.machine import process_tree_memory, this_machine
from benchmarks.report import format_table, median, number, paired_ratio, print_header, print_json, quantile
from benchmarks.workloads import NUM_NEW_TOKENS, PROMPTS_VOCAB_SIZE, PromptSet, Workload, select_workloads

FIRST_MARK = 1000  # ids of ordinary words, in SmolLM2's vocabulary
NUM_LONG_PROMPTS = 6


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--workloads", nargs="+", metavar="N-KIND", help="of 1, 8 and 32 streams, open and copy")
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW_TOKENS)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--vocab-size", type=int, default=PROMPTS_VOCAB_SIZE, help="of the served model")
    parser.add_argument("--chat", metavar="TOKENIZER", help="send chat messages, their text decoded by this folder's")
    parser.add_argument("--no-extensions", action="store_true", help="send OpenAI's fields only, and ignore_eos")
    parser.add_argument("--pid", type=int, nargs="+", default=[], help="of the server: report its processes' memory")
    parser.add_argument("--quick", action="store_true", help="one round of 1-open and 8-copy with 32 new tokens")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may wait for data")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the last line to a file, too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.new_tokens = 1, min(options.new_tokens, 32)
    return options


class RequestBodies:
    """Prompts as request bodies, each marked so that it shares no prefix with another."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        self._model, self._options = model, options
        self._marks: Iterator[int] = itertools.count(FIRST_MARK)
        self._tokenizer = None
        if options.chat:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(options.chat)

    @property
    def endpoint(self) -> str:
        return "/v1/chat/completions" if self._tokenizer else "/v1/completions"

    def body(self, prompt: list[int], num_new_tokens: int, drafts: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0,
            "max_tokens": num_new_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._options.no_extensions:
            body["include_speculation_metrics"] = True
            if not drafts:
                body["speculative"] = {"num_speculative_tokens": 0}
        mark = next(self._marks)
        if self._tokenizer is None:
            return {**body, "prompt": [mark % self._options.vocab_size, *prompt]}
        text = str(self._tokenizer.decode(prompt))
        question = text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        return {**body, "messages": [{"role": "user", "content": f"({mark}) {question}"}]}


@dataclass
class ModeRuns:
    """One workload with drafts or without: each round's results and seconds."""

    results: list[list[StreamResult]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> list[float]:
        pairs = zip(self.results, self.seconds, strict=True)
        return [sum(result.num_tokens for result in results) / s for results, s in pairs]

    def figures(self, baseline: "ModeRuns") -> dict[str, Any]:
        flat = [result for results in self.results for result in results]
        first = [1e3 * result.first_s for result in flat if result.first_s is not None]
        tokens = [1e3 * result.token_s for result in flat if result.token_s is not None]
        gaps = [1e3 * gap for result in flat for gap in result.gaps_s]
        return {
            "tokens_per_s": median(self.tokens_per_s),
            "tokens_per_s_rounds": self.tokens_per_s,
            "ratio": paired_ratio(self.tokens_per_s, baseline.tokens_per_s),
            "first_token_ms": {"p50": quantile(first, 0.5), "p95": quantile(first, 0.95)},
            "token_ms": {"p50": quantile(tokens, 0.5), "p95": quantile(tokens, 0.95)},
            "chunk_gap_ms": {"p50": quantile(gaps, 0.5), "p95": quantile(gaps, 0.95)},
            **_speculation(flat),
        }


def _speculation(results: list[StreamResult]) -> dict[str, Any]:
    metrics = [result.speculation for result in results if result.speculation]
    accepted, steps = sum(m["accepted"] for m in metrics), sum(m["steps"] for m in metrics)
    drafted = [sum(p) for p in itertools.zip_longest(*(m["drafted_per_position"] for m in metrics), fillvalue=0)]
    kept = [sum(p) for p in itertools.zip_longest(*(m["accepted_per_position"] for m in metrics), fillvalue=0)]
    return {
        "mean_acceptance_length": (accepted + steps) / steps if steps else None,
        "acceptance_by_position": [k / d if d else 0.0 for k, d in zip(kept, drafted, strict=True)],
    }


class ServerBenchmark:
    """Runs the workloads against one server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.model = options.model or first_model(options.url)
        self._bodies = RequestBodies(self.model, options)
        self._client = CompletionClient(options.url, self._bodies.endpoint, options.timeout)
        self._prompts = PromptSet(options.vocab_size)

    async def run(self, workloads: list[Workload]) -> tuple[list[float], dict[str, dict[str, ModeRuns]]]:
        """Seconds to the first token of the long prompts, and the runs by workload and mode."""
        modes = {"drafts": True} if self._options.no_extensions else {"plain": False, "drafts": True}
        runs = {workload.name: {mode: ModeRuns() for mode in modes} for workload in workloads}
        await self._wave(self._prompts.waves(workloads[0])[0], 8, drafts=True)
        num_long = 2 if self._options.quick else NUM_LONG_PROMPTS
        long_s = []
        for prompt in self._prompts.long_prompts[:num_long]:
            (result,) = await self._wave([prompt], 1, drafts=True)
            long_s.append(result.first_s or result.end_s)
        for repeat in range(self._options.repeats):
            for workload in workloads:
                for mode in modes if repeat % 2 == 0 else reversed(modes):
                    await self._round(runs[workload.name][mode], workload, modes[mode])
                    rate = runs[workload.name][mode].tokens_per_s[-1]
                    print(f"round {repeat + 1}: {workload.name} {mode}: {rate:.0f} tokens/s", file=sys.stderr)
        return long_s, runs

    async def _round(self, runs: ModeRuns, workload: Workload, drafts: bool) -> None:
        results, start = [], time.perf_counter()
        for prompts in self._prompts.waves(workload):
            results.extend(await self._wave(prompts, self._options.new_tokens, drafts))
        runs.seconds.append(time.perf_counter() - start)
        runs.results.append(results)

    async def _wave(self, prompts: list[list[int]], num_new_tokens: int, drafts: bool) -> list[StreamResult]:
        bodies = [self._bodies.body(prompt, num_new_tokens, drafts) for prompt in prompts]
        return await self._client.stream_all(bodies)


def print_table(workloads: dict[str, dict[str, dict[str, Any]]]) -> None:
    headers = ["workload", "mode", "tokens/s", "× plain", "first token p50", "p95", "token p50", "p95"]
    headers += ["chunk gap p50", "p95", "tokens a step", "accepted by position"]
    rows = []
    for name, modes in workloads.items():
        for mode, figures in modes.items():
            times = [
                figures[kind][q] for kind in ("first_token_ms", "token_ms", "chunk_gap_ms") for q in ("p50", "p95")
            ]
            rows.append(
                [
                    name,
                    mode,
                    number(figures["tokens_per_s"], 1),
                    number(figures["ratio"] if "plain" in modes else None, 2),
                    *(number(time_ms, 0 if index < 2 else 1) for index, time_ms in enumerate(times)),
                    number(figures["mean_acceptance_length"], 2),
                    " ".join(number(share, 2) for share in figures["acceptance_by_position"]) or "–",
                ]
            )
    print(format_table(headers, rows))
    print("\nTimes in ms. A chunk carries all tokens of a step.")


def run(options: argparse.Namespace) -> dict[str, Any]:
    workloads = select_workloads(options.workloads, options.quick)
    benchmark = ServerBenchmark(options)
    long_s, runs = asyncio.run(benchmark.run(workloads))
    figures = {
        name: {mode: mode_runs.figures(next(iter(modes.values()))) for mode, mode_runs in modes.items()}
        for name, modes in runs.items()
    }
    machine, memory = this_machine(), {str(pid): process_tree_memory(pid) for pid in options.pid}
    print_header(machine, f"{benchmark.model} at {options.url}, {options.new_tokens} new tokens a prompt, greedy")
    print_table(figures)
    print(f"\nfirst token of a 512-token prompt: {number(1e3 * (median(long_s) or 0), 0)} ms")
    for pid, usage in memory.items():
        print(
            f"memory of process {pid} and its descendants, {usage.num_processes} in all: "
            f"{usage.pss_bytes / 2**20:.0f} MiB now, {usage.peak_rss_bytes / 2**20:.0f} MiB sum of peaks, "
            f"{usage.largest_peak_rss_bytes / 2**20:.0f} MiB peak of the largest"
        )
    print()
    return {
        "benchmark": "serve",
        "machine": machine,
        "model": benchmark.model,
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "long_first_token_ms": 1e3 * (median(long_s) or 0),
        "memory": memory,
        "workloads": figures,
    }


def main() -> None:
    options = parse_arguments()
    try:
        result = run(options)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print_json(result, options.json)


if __name__ == "__main__":
    main()
