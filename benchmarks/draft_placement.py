"""Drafts made by the rank that verifies them, and by a draft actor beside it: tokens per second of both, in turn.

    python -m benchmarks.draft_placement .cache/models/SmolLM2-135M-Instruct --draft-model DRAFT_FOLDER

One rank, in a Ray of this machine alone. Engines of one method are loaded side by side and run round by round, each
round over the same prompts, so that what else the machine does falls on all of them. The machine's cores are the
target's, except where halves take turns: there one is the draft actor's.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import AppConfig
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.serve.launch import schedule_as_batch, tell_ray
from app.serve.processes import start_executor
from benchmarks.machine import this_machine
from benchmarks.report import format_table, print_header
from benchmarks.workloads import PromptSet, Workload
from kernels.cpu import threads

PLACEMENTS: dict[str, dict[str, Any]] = {
    "inline": {"placement": "inline"},
    "actor": {"placement": "actor", "num_microbatches": 1},
    "actor, two halves": {"placement": "actor", "num_microbatches": 2},
}
KINDS = {"draft_model": "open", "ngram": "copy", "suffix": "copy"}  # lookup finds next to nothing in open answers


class Contest:
    """Engines of one method that differ in where their drafts are made."""

    def __init__(self, fields: dict[str, Any], num_cores: int) -> None:
        self._num_cores = num_cores
        self._engines: dict[str, LLMEngine] = {}
        for name, placement in PLACEMENTS.items():
            speculative = fields["speculative_config"] | placement
            config = AppConfig.model_validate(fields | {"speculative_config": speculative})
            if placement["placement"] == "inline":
                self._engines[name] = LLMEngine(config, progress=False)
            else:
                self._engines[name] = LLMEngine.from_executor(config, *start_executor(config))

    def run(self, name: str, prompts: list[list[int]], num_new_tokens: int) -> dict[str, float]:
        """Tokens per second of one round, and what its drafts came to."""
        engine = self._engines[name]
        halves = engine.config.speculative_config.num_microbatches > 1
        threads.set_num_threads(max(self._num_cores - halves, 1))
        params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        before, start = engine.stats(), time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        seconds, after = time.perf_counter() - start, engine.stats()
        spent = {key: after[key] - before[key] for key in ("num_drafted", "num_accepted", "propose_s")}
        return {
            "rate": len(prompts) * num_new_tokens / seconds,
            "kept": spent["num_accepted"] / max(spent["num_drafted"], 1),
            "propose": spent["propose_s"] / seconds,
        }

    def shutdown(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()


def hold(fields: dict[str, Any], prompts: list[list[int]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Of every placement the best round, which was disturbed least, and medians over the rounds.

    The first round, which fills the prefix caches, does not count.
    """
    num_cores = len(os.sched_getaffinity(0))
    group = placement_group([{"CPU": num_cores + len(PLACEMENTS)}])  # reserved, not used: engines run in turn
    ray.get(group.ready())
    contest = (
        ray.remote(Contest)
        .options(num_cpus=num_cores, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))
        .remote(fields, num_cores)
    )
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in PLACEMENTS}
    for _ in range(1 + options.rounds):
        for name in PLACEMENTS:
            rounds[name].append(ray.get(contest.run.remote(name, prompts, options.new_tokens)))
    ray.get(contest.shutdown.remote())
    remove_placement_group(group)
    found = {}
    for name, own in rounds.items():
        found[name] = {key: statistics.median(each[key] for each in own[1:]) for key in own[0]}
        found[name]["best"] = max(each["rate"] for each in own[1:])
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft-model", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("-k", type=int, default=3, help="drafts a sequence and step")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    print_header(this_machine(), str(options.model), load=f"{os.getloadavg()[0]:.1f} processes at the start")
    tell_ray()
    schedule_as_batch()
    ray.init(
        address="local",
        num_cpus=len(os.sched_getaffinity(0)) + len(PLACEMENTS),
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    results = {}
    for method in options.methods:
        (prompts,) = PromptSet().waves(Workload(options.streams, KINDS[method]))[:1]
        speculative = {"method": method, "num_speculative_tokens": options.k}
        if method == "draft_model":
            speculative["model"] = str(options.draft_model)
        sizes = {"max_model_len": 512, "max_num_seqs": options.streams, "kv_cache_memory": 200_000_000}
        results[method] = hold(
            {"model": str(options.model), **sizes, "speculative_config": speculative}, prompts, options
        )
        rows = []
        for name, found in results[method].items():
            shares = (f"{found['kept']:.0%}", f"{found['propose']:.0%}")
            ratio = found["best"] / results[method]["inline"]["best"]
            rows.append([method, name, f"{found['best']:.1f}", f"{ratio:.2f}", f"{found['rate']:.1f}", *shares])
        headers = ["method", "drafts", "best tokens/s", "x inline", "median", "kept", "waited for drafts"]
        print(format_table(headers, rows), flush=True)
    ray.shutdown()
    print(f"load at the end: {os.getloadavg()[0]:.1f} processes")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
