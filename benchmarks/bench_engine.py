"""Measures the engine offline: throughput, acceptance, where a step's time goes, start-up and memory.

    python benchmarks/bench_engine.py --model .cache/models/SmolLM2-135M-Instruct --methods plain suffix ngram:4
    python benchmarks/bench_engine.py --model tests/assets/tiny-deepseek-v3 --methods plain mtp:1 mtp:3 mtp \
        --prompts tests/assets/tiny-deepseek-v3/heldout.json

    python benchmarks/bench_engine.py --methods plain ngram suffix draft_model random \
        --draft-model .cache/models/SmolLM2-135M-first6     (made by benchmarks/first_layers.py)

All methods run in one process, alternately, round by round; figures are medians over the rounds, ratios medians of
the ratios within a round. Prefix caching is off, since every round repeats the prompts.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.draft_cost import add_draft_costs, print_draft_costs
from benchmarks.engine_methods import DEFAULT_MODEL, build_engine, check_model, draft_number, engine_fields
from benchmarks.engine_report import MethodRuns, method_result, print_tables
from benchmarks.engine_runs import EngineRunner
from benchmarks.machine import read_bandwidth, this_machine
from benchmarks.operators import TorchOperators, is_dense, step_weight_bytes
from benchmarks.report import print_header, print_json
from benchmarks.startup_probe import measure_startup
from benchmarks.workloads import NUM_NEW_TOKENS, PromptSet, Workload, read_prompts, select_workloads
from kernels.cpu import threads
from models.config import read_model_config

NUM_LONG_PROMPTS = 6


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="folder, hub id or .gguf file")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["plain", "suffix", "ngram"],
        metavar="METHOD[:K]",
        help="plain, suffix_memory, random, or a method of speculative_config; with the number of its drafts",
    )
    parser.add_argument("--num-speculative-tokens", type=draft_number, help="a number or auto; default: the method's")
    parser.add_argument("--draft-model", help="folder, hub id or .gguf file, for the method draft_model")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON with prompt_ids, in place of our prompts")
    parser.add_argument("--workloads", nargs="+", metavar="N-KIND", help="1, 8 and 32 streams, open and copy, or given")
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW_TOKENS)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-threads", type=int, help="CPU threads of the model; default: all cores")
    parser.add_argument("--quick", action="store_true", help="one round of 1-open and 8-copy with 32 new tokens")
    parser.add_argument("--no-startup", action="store_true", help="leave out start-up and memory")
    parser.add_argument("--no-operators", action="store_true", help="leave out the sum of torch operators")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the last line to a file, too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.new_tokens = 1, min(options.new_tokens, 32)
    return options


def measure(
    runners: dict[str, EngineRunner], prompts: PromptSet, workloads: list[Workload], options: argparse.Namespace
) -> dict[str, MethodRuns]:
    """All rounds. The order of the methods turns with the round."""
    runs = {method: MethodRuns() for method in runners}
    for runner in runners.values():
        runner.run([prompts.long_prompts[-1:], prompts.waves(workloads[-1])[0]], num_new_tokens=8)
    methods = list(runners)
    num_long = 2 if options.quick else NUM_LONG_PROMPTS
    for repeat in range(options.repeats):
        order = methods[repeat % len(methods) :] + methods[: repeat % len(methods)]
        for prompt in prompts.long_prompts[:num_long]:
            for method in order:
                runs[method].long_first_token_s.append(runners[method].first_token_s(prompt))
        for workload in workloads:
            for method in order:
                run = runners[method].run(prompts.waves(workload), options.new_tokens)
                runs[method].by_workload.setdefault(workload.name, []).append(run)
                _say(f"round {repeat + 1}: {workload.name} {method}: {run.tokens_per_s:.0f} tokens/s")
    return runs


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = check_model(options.model)
    workloads = select_workloads(options.workloads, options.quick, given=options.prompts is not None)
    configs = {method: engine_fields(method, options) for method in options.methods}
    machine, model_config = this_machine(), read_model_config(folder)
    dtype = model_config.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else None
    device = device or torch.device(options.device)
    given = read_prompts(options.prompts, model_config.vocab_size) if options.prompts is not None else None
    prompts = PromptSet(model_config.vocab_size, given)

    has_operators = not options.no_operators and is_dense(model_config)

    startup = {}
    for method, config in configs.items():
        if not options.no_startup:
            _say(f"start-up of {method}")
            startup[method] = measure_startup(config)
    weight_bytes = step_weight_bytes(model_config, dtype)
    bandwidth = read_bandwidth(device)
    runners = {method: EngineRunner(build_engine(method, config)) for method, config in configs.items()}
    runs = measure(runners, prompts, workloads, options)
    for runner in runners.values():
        runner.engine.shutdown()
    torch.set_num_threads(threads.num_threads())  # engines leave torch's own operators one
    bandwidth = max(bandwidth, read_bandwidth(device))

    operators = TorchOperators(model_config, dtype, device) if has_operators else None
    baseline = runs[options.methods[0]]
    result: dict[str, Any] = {
        "benchmark": "engine",
        "machine": machine,
        "model": options.model,
        "dtype": str(dtype).removeprefix("torch."),
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "step_weight_bytes": weight_bytes,
        "read_bandwidth_bytes_per_s": bandwidth,
        "methods": {
            method: {
                "startup": startup.get(method),
                **method_result(runs[method], baseline, workloads, prompts, weight_bytes / bandwidth, operators),
            }
            for method in options.methods
        },
    }
    add_draft_costs(result["methods"], model_config, options.num_speculative_tokens)
    print_header(
        machine,
        f"{options.model}, {result['dtype']}, {options.new_tokens} new tokens a prompt, greedy",
        limit=f"{weight_bytes / 1e6:.0f} MB of weights a step, read at {bandwidth / 1e9:.1f} GB/s: "
        f"{1e3 * weight_bytes / bandwidth:.1f} ms a step at best",
    )
    print_tables(result["methods"], baseline=options.methods[0])
    print_draft_costs(result["methods"])
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = parse_arguments()
    try:
        result = run(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print_json(result, options.json)


if __name__ == "__main__":
    main()
