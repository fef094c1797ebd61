"""What drafts of MTP modules cost beside the target's pass: as measured, and by their arithmetic."""

from typing import Any

from app.planning.checkpoint_shape import CheckpointShape
from app.planning.network_share import Layout, NetworkShare, mtp_share, target_share
from benchmarks.report import format_table, number
from models.model_config import ModelConfig


def plan_target(config: ModelConfig) -> NetworkShare:
    return target_share(CheckpointShape(config, has_fp8_weights=False), Layout())


def body_elements(network: NetworkShare) -> float:
    """Weights that a row is multiplied with, without the head."""
    routed = network.routed.num_elements
    if network.experts is not None:
        routed = routed * network.experts.num_per_token / network.experts.num_experts
    return network.body.num_elements + routed


def row_elements(network: NetworkShare) -> float:
    """The same with the head."""
    return body_elements(network) + network.head.num_elements


def arithmetic_share(config: ModelConfig, drafts: float, tokens: float) -> float:
    """Products of a step's drafting over those of its verification, attention to the context left out.

    A sequence has `drafts` drafts in a step and keeps `tokens` tokens. The modules run over every token that was kept,
    then on over each draft but the last.
    """
    target = plan_target(config)
    module = mtp_share(CheckpointShape(config, has_fp8_weights=False), Layout(), target)
    num_rows = tokens * config.num_nextn_predict_layers + max(drafts - 1, 0)
    drafting = num_rows * body_elements(module) + drafts * module.head.num_elements
    return drafting / ((1 + drafts) * row_elements(target))


def add_draft_costs(methods: dict[str, dict[str, Any]], config: ModelConfig) -> None:
    """To each workload of an mtp method, under `draft_cost`."""
    for method, result in methods.items():
        if method.partition(":")[0] != "mtp":
            continue
        for cell in result["workloads"].values():
            step = cell["step_ms"]
            cell["draft_cost"] = {
                "share_of_step": step["propose"] / step["total"],
                "measured": step["propose"] / step["forward"],
                "arithmetic": arithmetic_share(config, cell["drafts_a_sequence"], cell["mean_acceptance_length"]),
            }


def print_draft_costs(methods: dict[str, dict[str, Any]]) -> None:
    rows = []
    for method, result in methods.items():
        for name, cell in result["workloads"].items():
            if "draft_cost" in cell:
                cost = cell["draft_cost"]
                cells = [
                    cost["share_of_step"],
                    cost["measured"],
                    cost["arithmetic"],
                    cost["measured"] / cost["arithmetic"],
                ]
                rows.append([name, method, *(number(value, 2) for value in cells)])
    if rows:
        headers = ["workload", "method", "drafting of step", "beside target's pass", "by arithmetic", "× arithmetic"]
        print(f"\n{format_table(headers, rows)}\n")
