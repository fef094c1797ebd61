"""What drafts of MTP modules cost beside the target's pass: as measured, and by their arithmetic."""

from typing import Any

from app.planning.checkpoint_shape import CheckpointShape
from app.planning.network_share import Layout, NetworkShare, mtp_share, target_share
from benchmarks.report import format_table, number
from models.model_config import ModelConfig


def plan_target(config: ModelConfig) -> NetworkShare:
    return target_share(CheckpointShape(config, has_fp8_weights=False), Layout())


def row_elements(network: NetworkShare) -> float:
    """Weights that a row is multiplied with."""
    routed = network.routed.num_elements
    if network.experts is not None:
        routed = routed * network.experts.num_per_token / network.experts.num_experts
    return network.body.num_elements + routed + network.head.num_elements


def arithmetic_share(config: ModelConfig) -> float:
    """Products of a module's row over those of the target's, attention to the context left out."""
    target = plan_target(config)
    module = mtp_share(CheckpointShape(config, has_fp8_weights=False), Layout(), target)
    return row_elements(module) / row_elements(target)


def add_draft_costs(methods: dict[str, dict[str, Any]], config: ModelConfig, num_drafts: int | str | None) -> None:
    """To each workload of an mtp method, under `draft_cost`. Where the number of drafts changes, shares are unknown.

    `pass_share`: a draft's pass beside a pass of plain decoding. `rows_share`: all that drafting takes beside what the
    target takes for as many rows, sampling included on both sides; this is what arithmetic speaks of.
    """
    for method, result in methods.items():
        name, _, number_text = method.partition(":")
        if name != "mtp":
            continue
        drafts, num_modules = number_text or num_drafts, config.num_nextn_predict_layers
        k = int(drafts) if str(drafts).isdecimal() and "plain" in methods else None
        for workload, cell in result["workloads"].items():
            step, pass_share, rows_share = cell["step_ms"], None, None
            if k is not None:
                plain = methods["plain"]["workloads"][workload]["step_ms"]
                pass_share = step["propose"] / (k + num_modules - 1) / plain["forward"]
                rows_share = step["propose"] / target_ms(plain, step, cell["mean_acceptance_length"], k, num_modules)
            cell["draft_cost"] = {
                "share_of_step": step["propose"] / step["total"],
                "pass_share": pass_share,
                "rows_share": rows_share,
                "arithmetic": arithmetic_share(config),
                "over_arithmetic": rows_share / arithmetic_share(config) if rows_share is not None else None,
            }


def target_ms(
    plain: dict[str, float],  # a step of plain decoding by phase: one row a sequence
    step: dict[str, float],  # a step with k drafts: 1 + k rows a sequence
    num_kept: float,  # tokens a sequence and step, which the modules run over at first
    k: int,
    num_modules: int,
) -> float:
    """The target's time for the rows of a step's drafting: passes over what was kept, then over a row each.

    Between the two steps that are measured, a pass costs in proportion to its rows.
    """
    pass_over_kept = plain["forward"] + (step["forward"] - plain["forward"]) * (num_kept - 1) / k
    return num_modules * pass_over_kept + (k - 1) * plain["forward"] + k * plain["verify"]


def print_draft_costs(methods: dict[str, dict[str, Any]]) -> None:
    rows = []
    for method, result in methods.items():
        for name, cell in result["workloads"].items():
            if "draft_cost" in cell:
                cost, step = cell["draft_cost"], cell["step_ms"]
                shares = [cost["share_of_step"], step["forward"] / step["total"], step["verify"] / step["total"]]
                shares.append(1 - sum(shares))
                passes = [cost["pass_share"], cost["rows_share"], cost["arithmetic"], cost["over_arithmetic"]]
                rows.append([name, method, *(number(value, 2) for value in [*shares, *passes])])
    if rows:
        headers = ["workload", "method", "propose", "target", "sample", "rest"]
        headers += ["a draft's pass", "by rows", "by arithmetic", "rows over arithmetic"]
        print(f"\n{format_table(headers, rows)}\n")
        print(
            "Shares of a step: drafts; the target's pass; rejection sampling. A draft's pass: beside one of plain "
            "decoding.\nBy rows: drafting beside the target over as many rows; over its share of the arithmetic, 1.10 "
            "is the aim.\n"
        )
