"""Draws docs/mtp.svg: what drafts of an MTP module bring, against their number, from the engine benchmark's JSON.

    python benchmarks/bench_engine.py --model tests/assets/tiny-deepseek-v3 --no-startup \\
        --prompts tests/assets/tiny-deepseek-v3/heldout.json \\
        --methods plain mtp:1 mtp:2 mtp:3 mtp:4 mtp:5 mtp --json results/mtp.json
    python docs/plot_mtp.py results/mtp.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

INK, SOFT, RULE, PAPER = "#1e293b", "#526074", "#cbd5e1", "#f8fafc"
COLORS = ("#047857", "#b45309", "#1d4ed8")  # of workloads, in their order
AUTO = "auto"


def cells_by_k(result: dict[str, Any], workload: str) -> dict[int, dict[str, Any]]:
    """The workload's figures of every fixed number of drafts."""
    cells = {}
    for method, measured in result["methods"].items():
        name, _, number = method.partition(":")
        if name == "mtp" and number.isdecimal():
            cells[int(number)] = measured["workloads"][workload]
    return dict(sorted(cells.items()))


def draw_acceptance(ax: Axes, result: dict[str, Any], workload: str) -> None:
    """Tokens a step at each k, each draft's share of them stacked on the one that a step always brings."""
    cells = cells_by_k(result, workload)
    for k, cell in cells.items():
        bottom = 0.0
        for position, share in enumerate([1.0, *cell["acceptance_by_position"]]):
            color = "#e2e8f0" if position == 0 else "#a7f3d0"
            ax.bar(k, share, 0.62, bottom=bottom, color=color, edgecolor="#64748b", linewidth=0.7)
            if position:
                ax.text(k, bottom + share / 2, f"{share:.2f}", ha="center", va="center", fontsize=8, color=INK)
            bottom += share
        ax.text(
            k,
            bottom + 0.05,
            f"{cell['mean_acceptance_length']:.2f}",
            ha="center",
            va="bottom",
            fontsize=9,
            color=INK,
            weight="bold",
        )
    ax.set(xlabel="drafts a step, k", ylabel="tokens a step", xticks=list(cells))
    ax.set_ylim(0, ax.get_ylim()[1] * 1.08)
    ax.set_title(f"accepted by position, {workload.partition('-')[0]} prompts", loc="left", fontsize=10, color=SOFT)


def draw_speed(ax: Axes, result: dict[str, Any], workloads: list[str]) -> None:
    """Tokens a second over those of plain decoding, of the same round."""
    last = 0
    for workload, color in zip(workloads, COLORS, strict=True):
        cells = cells_by_k(result, workload)
        last = max(cells)
        ks, ratios = [0, *cells], [1.0, *(cell["ratio"] for cell in cells.values())]
        sequences = workload.partition("-")[0]
        ax.plot(ks, ratios, color=color, marker="o", markersize=4, label=f"{sequences} at once")
        if "mtp" in result["methods"]:
            ratio = result["methods"]["mtp"]["workloads"][workload]["ratio"]
            ax.plot([last + 1], [ratio], color=color, marker="D", markersize=6, linestyle="none")
    ax.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ticks = [*range(last + 1), last + 1]
    ax.set_xticks(ticks, [*map(str, ticks[:-1]), AUTO])
    ax.set(xlabel="drafts a step, k", ylabel="× plain decoding")
    ax.set_title("tokens a second", loc="left", fontsize=10, color=SOFT)
    ax.legend(frameon=False, fontsize=9)


def draw(result: dict[str, Any]) -> plt.Figure:
    workloads = list(result["methods"]["plain"]["workloads"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7), layout="constrained")
    draw_acceptance(left, result, workloads[-1])  # the most prompts
    draw_speed(right, result, workloads)
    for ax in (left, right):
        ax.set_facecolor(PAPER)
        ax.tick_params(colors=SOFT, labelsize=9)
        ax.xaxis.label.set_color(INK)
        ax.yaxis.label.set_color(INK)
        for side in ax.spines.values():
            side.set_color(RULE)
    return figure


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/plot_mtp.py RESULT.json")
    plt.rcParams.update({"svg.hashsalt": "forerun", "font.family": "DejaVu Sans"})
    path = Path(__file__).with_name("mtp.svg")
    figure = draw(json.loads(Path(sys.argv[1]).read_text()))
    figure.savefig(path, format="svg", facecolor="#ffffff", metadata={"Date": None, "Creator": None})
    print(path)


if __name__ == "__main__":
    main()
