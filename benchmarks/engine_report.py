"""From runs of the engine to figures and tables."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine_runs import PHASES, EngineRun
from benchmarks.operators import StepShape, TorchOperators, decode_shape
from benchmarks.report import format_table, median, number, paired_ratio
from benchmarks.workloads import PromptSet, Workload, matching_prefix

LONG_SHAPE = StepShape(num_seqs=1, rows_per_seq=512, context_len=512, logits_per_seq=1)
MAX_TORCH_RATIO = 2.0
MAX_BESIDES_MS = 2.0  # of 32 sequences


@dataclass
class MethodRuns:
    """All rounds of one method."""

    by_workload: dict[str, list[EngineRun]] = field(default_factory=dict)
    long_first_token_s: list[float] = field(default_factory=list)


def method_result(
    runs: MethodRuns,
    baseline: MethodRuns,
    workloads: list[Workload],
    prompts: PromptSet,
    floor_s: float,  # a step's weights at the machine's read bandwidth
    operators: TorchOperators | None,
) -> dict[str, Any]:
    long_ms = 1e3 * (median(runs.long_first_token_s) or 0.0)
    return {
        "long_first_token_ms": long_ms,
        "long_torch_ms": operators.times_ms(LONG_SHAPE)["total"] if operators else None,
        "workloads": {
            workload.name: _workload_result(
                runs.by_workload[workload.name],
                baseline.by_workload[workload.name],
                prompts.waves(workload),
                prompts.references(workload),
                floor_s,
                operators,
            )
            for workload in workloads
        },
    }


def _workload_result(
    runs: list[EngineRun],
    baseline: list[EngineRun],
    waves: list[list[list[int]]],
    references: list[list[int]] | None,
    floor_s: float,
    operators: TorchOperators | None,
) -> dict[str, Any]:
    last = runs[-1]
    steps = [run.step_ms for run in runs]
    step_ms = {name: statistics.median([step[name] for step in steps]) for name in steps[0]}
    torch_ms = operators.times_ms(_mean_shape(last, waves)) if operators and last.num_steps else None
    return {
        "tokens_per_s": median([run.tokens_per_s for run in runs]),
        "tokens_per_s_rounds": [run.tokens_per_s for run in runs],
        "ratio": paired_ratio([run.tokens_per_s for run in runs], [run.tokens_per_s for run in baseline]),
        "decode_tokens_per_s": median([run.decode_tokens_per_s for run in runs]),
        "mean_acceptance_length": last.mean_acceptance_length,
        "num_drafted": last.counts["num_drafted"],
        "acceptance_by_position": last.acceptance_by_position,
        "bandwidth_share": median([floor_s * run.num_steps / run.decode_s for run in runs if run.decode_s]),
        "first_token_ms": median([1e3 * s for run in runs for s in run.first_token_s]),
        "num_decode_steps": last.num_steps,
        "step_ms": step_ms,
        "torch_operators_ms": torch_ms,
        "torch_ratio": step_ms["total"] / torch_ms["total"] if torch_ms else None,
        "num_prompts": len(last.token_ids),
        "num_equal_to_baseline": count_equal(last.token_ids, baseline[-1].token_ids),
        "num_equal_to_reference": count_equal(last.token_ids, references) if references else None,
    }


def count_equal(outputs: list[list[int]], others: list[list[int]]) -> int:
    """Outputs that say the same as far as both go."""
    pairs = zip(outputs, others, strict=True)
    return sum(matching_prefix(a, b) == min(len(a), len(b)) for a, b in pairs)


def _mean_shape(run: EngineRun, waves: list[list[list[int]]]) -> StepShape:
    """The average decode step of a run."""
    prompts = [len(prompt) for wave in waves for prompt in wave]
    context = sum(prompts) / len(prompts) + run.num_tokens / len(prompts) / 2
    num_drafted = run.counts["num_drafted"]
    return decode_shape(
        num_seqs=run.num_verifications / run.num_steps,
        rows_per_seq=1 + num_drafted / max(run.num_verifications, 1),
        context_len=context,
    )


def print_tables(methods: dict[str, dict[str, Any]], baseline: str) -> None:
    names = list(next(iter(methods.values()))["workloads"])
    cells = [(name, method, methods[method]["workloads"][name]) for name in names for method in methods]
    print(_throughput_table(cells, baseline))
    print(f"\n= {baseline}, = fp32: prompts whose tokens equal those of {baseline} and of the fp32 reference.\n")
    print(_step_table(cells))
    print(
        "\nMilliseconds a decode step. torch: the sum of its torch operators, each timed alone in its fastest form.\n"
    )
    print(_method_table(methods))
    _print_verdict(methods, cells)


def _throughput_table(cells: list[tuple[str, str, dict[str, Any]]], baseline: str) -> str:
    headers = ["workload", "method", "tokens/s", f"× {baseline}", "decode tokens/s", "tokens a step", "of limit"]
    headers += [f"= {baseline}", "= fp32", "accepted by position"]
    rows = []
    for name, method, cell in cells:
        share, num = cell["bandwidth_share"], cell["num_prompts"]
        reference = cell["num_equal_to_reference"]
        rows.append(
            [
                name,
                method,
                number(cell["tokens_per_s"], 1),
                number(cell["ratio"], 2),
                number(cell["decode_tokens_per_s"], 1),
                number(cell["mean_acceptance_length"], 2),
                number(None if share is None else 100 * share, 0, "%"),
                f"{cell['num_equal_to_baseline']}/{num}",
                "–" if reference is None else f"{reference}/{num}",
                " ".join(number(share, 2) for share in cell["acceptance_by_position"]) or "–",
            ]
        )
    return format_table(headers, rows)


def _step_table(cells: list[tuple[str, str, dict[str, Any]]]) -> str:
    phases = [*PHASES, "other", "total"]
    rows = []
    for name, method, cell in cells:
        torch_ms = cell["torch_operators_ms"]
        step = [number(cell["step_ms"][phase], 2) for phase in phases]
        rows.append([name, method, *step, number(torch_ms and torch_ms["total"], 2), number(cell["torch_ratio"], 2)])
    return format_table(["workload", "method", *phases, "torch", "× torch"], rows)


def _method_table(methods: dict[str, dict[str, Any]]) -> str:
    rows = []
    for method, result in methods.items():
        startup = result["startup"]
        rows.append(
            [
                method,
                number(result["long_first_token_ms"], 0, " ms"),
                number(result["long_torch_ms"], 0, " ms"),
                number(startup and startup.imported_s, 1, " s"),
                number(startup and startup.loaded_s, 1, " s"),
                number(startup and startup.first_token_s, 1, " s"),
                number(startup and startup.peak_rss_bytes / 2**20, 0, " MiB"),
            ]
        )
    headers = [
        "method",
        "first token, 512 prompt",
        "its torch operators",
        "imported",
        "loaded",
        "first token",
        "peak RSS",
    ]
    return format_table(headers, rows, num_left=1)


def _print_verdict(methods: dict[str, dict[str, Any]], cells: list[tuple[str, str, dict[str, Any]]]) -> None:
    """The slowest step beside its torch operators, prompts of 512 tokens included."""
    ratios = [(cell["torch_ratio"], f"{name} {method}") for name, method, cell in cells if cell["torch_ratio"]]
    for method, result in methods.items():
        if result["long_torch_ms"]:
            ratios.append((result["long_first_token_ms"] / result["long_torch_ms"], f"512-token prompt, {method}"))
    if ratios:
        ratio, where = max(ratios)
        relation = "within" if ratio <= MAX_TORCH_RATIO else "above"
        print(
            f"\nslowest step beside its torch operators: {ratio:.2f} × ({where}), {relation} {MAX_TORCH_RATIO:.0f} ×\n"
        )
    besides = [(besides_ms(cell["step_ms"]), f"{name} {method}") for name, method, cell in cells]
    most_ms, where = max(besides)
    relation = "within" if most_ms <= MAX_BESIDES_MS else "above"
    print(
        "scheduling, sampling and texts of a step, at most (median of each run): "
        f"{most_ms:.2f} ms ({where}), {relation} {MAX_BESIDES_MS:.0f} ms\n"
    )


def besides_ms(step_ms: dict[str, float]) -> float:
    """Of a step, what is neither drafting nor the target's pass."""
    return sum(step_ms[phase] for phase in ("schedule", "verify", "commit", "update"))
