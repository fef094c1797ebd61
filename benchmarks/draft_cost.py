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
    """To each workload of an mtp method, under `draft_cost`.

    A draft's pass has a row a sequence, as the target's has in plain decoding, and is set beside it; the first has a
    row for each token that was kept. Where the number of drafts changes from step to step, passes are not counted.
    """
    for method, result in methods.items():
        name, _, number_text = method.partition(":")
        if name != "mtp":
            continue
        drafts = number_text or num_drafts
        num_passes = int(drafts) + config.num_nextn_predict_layers - 1 if str(drafts).isdecimal() else None
        for workload, cell in result["workloads"].items():
            step = cell["step_ms"]
            plain = methods["plain"]["workloads"][workload]["step_ms"]["forward"] if "plain" in methods else None
            pass_share = step["propose"] / num_passes / plain if num_passes and plain else None
            cell["draft_cost"] = {
                "share_of_step": step["propose"] / step["total"],
                "pass_share": pass_share,
                "arithmetic": arithmetic_share(config),
            }


def print_draft_costs(methods: dict[str, dict[str, Any]]) -> None:
    rows = []
    for method, result in methods.items():
        for name, cell in result["workloads"].items():
            if "draft_cost" in cell:
                cost, step = cell["draft_cost"], cell["step_ms"]
                shares = [cost["share_of_step"], step["verify"] / step["total"]]
                shares.append(1 - sum(shares) - step["forward"] / step["total"])
                passes = [cost["pass_share"], cost["arithmetic"]]
                rows.append([name, method, *(number(value, 2) for value in [*shares, *passes])])
    if rows:
        headers = ["workload", "method", "propose", "verify", "rest", "a draft's pass", "by arithmetic"]
        print(f"\n{format_table(headers, rows)}\n")
        print(
            "Shares of a step, the rest being the target's pass. A draft's pass: beside the target's of as many rows.\n"
        )
