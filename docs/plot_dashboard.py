"""Draws docs/dashboard.svg: panels of the Grafana dashboard over a series that docs/record_metrics.py recorded.

python -m docs.plot_dashboard SERIES.json
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from docs.dashboard_panels import BY_NAME, ROWS, Level, Panel, Quantile, Query, Rate, Ratio

INK, SOFT, RULE, PAPER = "#1e293b", "#526074", "#cbd5e1", "#f8fafc"
COLORS = ("#1d4ed8", "#b45309", "#047857", "#9333ea", "#be123c", "#0e7490", "#65a30d", "#475569")
SHOWN = {
    "Traffic": ["Tokens a second", "Sequences"],
    "Latency": ["Time to first token", "Between deliveries"],
    "Speculation": [
        "Speed-up against plain decoding",
        "Acceptance by position",
        "Draft length and acceptance length",
        "Draft tokens that were not made",
    ],
    "Engine": ["Time in each phase, a second", "KV cache in use"],
}
WINDOW_S = 10.0

Line = tuple[list[float], list[float]]  # seconds, values


class Series:
    """What a server's endpoint said, time after time; answers a panel's queries as Prometheus does."""

    def __init__(self, samples: list[dict]) -> None:
        self._times = [sample["time_s"] for sample in samples]
        self._values = [sample["values"] for sample in samples]

    def lines(self, legend: str, query: Query) -> dict[str, Line]:
        """By legend."""
        if isinstance(query, Level):
            name = BY_NAME[query.metric].exported_name
            shown = [i for i, values in enumerate(self._values) if name in values]
            return {legend: ([self._times[i] for i in shown], [self._values[i][name] for i in shown])}
        lines: dict[str, Line] = {}
        for label in self._labels(query):
            shown = legend if not label else legend.replace("{{" + str(self._label_name(query)) + "}}", label)
            points = [(self._times[i], self._at(query, label, i)) for i in range(len(self._times))]
            kept = [(time, value) for time, value in points if value is not None]
            lines[shown] = ([time for time, _ in kept], [value for _, value in kept])
        return lines

    @staticmethod
    def _label_name(query: Query) -> str | None:
        rate = query.top if isinstance(query, Ratio) else query
        return rate.label if isinstance(rate, Rate) else None

    def _labels(self, query: Query) -> list[str]:
        rate = query.top if isinstance(query, Ratio) else query
        if not isinstance(rate, Rate) or rate.label is None:
            return [""]
        prefix = BY_NAME[rate.metric].exported_name + ":"
        found = {key.removeprefix(prefix) for values in self._values for key in values if key.startswith(prefix)}
        return sorted(found)

    def _at(self, query: Query, label: str, index: int) -> float | None:
        if isinstance(query, Ratio):
            top, bottom = self._rise(query.top, label, index), self._rise(query.bottom, label, index)
            return query.plus + top / bottom if top is not None and bottom else None
        if isinstance(query, Quantile):
            return self._quantile(query, index)
        assert isinstance(query, Rate)
        rise = self._rise(query, label, index)
        return None if rise is None else rise / (self._times[index] - self._times[self._start(index)])

    def _rise(self, rate: Rate, label: str, index: int) -> float | None:
        start = self._start(index)
        return self._total(rate, label, index) - self._total(rate, label, start) if start < index else None

    def _total(self, rate: Rate, label: str, index: int) -> float:
        """Over all labels where none is given; a counter that has not shown yet is 0."""
        name = BY_NAME[rate.metric].exported_name
        values = self._values[index].items()
        return sum(value for key, value in values if (key if label else key.partition(":")[0]) == name + _suffix(label))

    def _start(self, index: int) -> int:
        """Of the window that ends at `index`."""
        start = index
        while start > 0 and self._times[index] - self._times[start] < WINDOW_S:
            start -= 1
        return start

    def _quantile(self, query: Quantile, index: int) -> float | None:
        prefix = f"{BY_NAME[query.metric].exported_name}_bucket:"
        now, before = self._values[index], self._values[self._start(index)]
        rises = {
            float(key.removeprefix(prefix)): value - before.get(key, 0.0)
            for key, value in now.items()
            if key.startswith(prefix)
        }
        if not rises or not rises[max(rises)]:
            return None
        wanted, below, lower = query.quantile * rises[max(rises)], 0.0, 0.0
        for upper, count in sorted(rises.items()):
            if count >= wanted:
                if upper == float("inf"):
                    return lower
                return lower + (upper - lower) * (wanted - below) / max(count - below, 1e-9)
            below, lower = count, upper
        return lower


def _suffix(label: str) -> str:
    return f":{label}" if label else ""


def _format(panel: Panel, value: float) -> str:
    if not value:
        return "0"
    if panel.unit == "percentunit":
        return f"{value:.0%}"
    if panel.unit == "s":
        return f"{1e3 * value:g} ms" if value < 1 else f"{value:g} s"
    return f"{value:g}{panel.unit.removeprefix('suffix:')}" if panel.unit.startswith("suffix:") else f"{value:g}"


def draw(ax: Axes, panel: Panel, series: Series) -> None:
    lines: dict[str, Line] = {}
    for legend, query in panel.queries.items():
        lines |= series.lines(legend, query)
    lines = {legend: line for legend, line in lines.items() if any(line[1])}
    colors = [COLORS[index % len(COLORS)] for index in range(len(lines))]
    if panel.stacked:
        [times, _], *_ = lines.values()
        ax.stackplot(times, [line[1] for line in lines.values()], labels=list(lines), colors=colors, alpha=0.55)
    else:
        for (legend, (times, values)), color in zip(lines.items(), colors, strict=True):
            ax.plot(times, values, color=color, linewidth=1.3, label=legend)
    ax.set_title(panel.title, loc="left", fontsize=9, color=INK)
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    ax.set_facecolor(PAPER)
    ax.grid(axis="y", color=RULE, linewidth=0.5)
    ax.tick_params(colors=SOFT, labelsize=7.5, length=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _format(panel, value)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    for side in ax.spines.values():
        side.set_color(RULE)
    ax.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1), labelcolor=SOFT)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m docs.plot_dashboard SERIES.json")
    plt.rcParams.update({"svg.hashsalt": "forerun", "font.family": "DejaVu Sans"})
    series = Series(json.loads(Path(sys.argv[1]).read_text()))
    panels = [panel for row, titles in SHOWN.items() for panel in ROWS[row] if panel.title in titles]
    num_lines = -(-len(panels) // 2)
    figure, axes = plt.subplots(num_lines, 2, figsize=(10, 2.25 * num_lines), layout="constrained")
    for ax, panel in zip(axes.flat, panels, strict=True):
        draw(ax, panel, series)
    path = Path(__file__).with_name("dashboard.svg")
    figure.savefig(path, format="svg", facecolor="#ffffff", metadata={"Date": None, "Creator": None})
    print(path)


if __name__ == "__main__":
    main()
