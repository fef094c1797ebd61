"""Draws docs/step.svg: one speculative step of four sequences, as one ragged batch. Run: python docs/draw_step.py"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

WIDTH, HEIGHT = 1120, 652  # points
ROW, CHIP_HEIGHT, CHIP_WIDTH = 27, 20, 62
INPUT_X, TARGET_X, TARGET_END, OUTPUT_X, COMMIT_X = 206, 296, 400, 440, 722
LEFT, CELL_WIDTH, CELL_HEIGHT = 36, 39, 20
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"

INK, SOFT, FAINT, PAPER, CARD, RULE = "#1e293b", "#526074", "#94a3b8", "#f8fafc", "#ffffff", "#cbd5e1"
KINDS = {  # fill, edge and text of a token by what became of it
    "known": ("#e2e8f0", "#64748b", "#1e293b"),
    "draft": ("#fef3c7", "#b45309", "#78350f"),
    "accepted": ("#d1fae5", "#047857", "#065f46"),
    "recovered": ("#dbeafe", "#1d4ed8", "#1e3a8a"),
    "bonus": ("#ede9fe", "#6d28d9", "#4c1d95"),
    "sampled": ("#dbeafe", "#1d4ed8", "#1e3a8a"),
    "dropped": ("#f8fafc", "#b8c2cf", "#8492a6"),
}

CELLS = {  # fill, edge and text of a KV slot
    "before": ("#e2e8f0", "#94a3b8", "#475569"),
    "now": ("#a7f3d0", "#047857", "#065f46"),
    "rejected": ("#fee2e2", "#e29a9a", "#b91c1c"),
    "ahead": ("#ffffff", "#94a3b8", "#64748b"),
}


@dataclass(frozen=True)
class Lane:
    """One sequence of the batch: its tokens, its rows in this step and what the target said to them."""

    title: str
    note: str
    computed: list[str]  # tokens whose KV is there
    known: list[str]  # tokens computed in this step
    ahead: list[str]  # known tokens left for later steps
    drafts: list[str]
    said: list[tuple[str, str, str]]  # the target's token, what it is, remark; from the last known token on

    @property
    def num_rows(self) -> int:
        return len(self.known) + len(self.drafts)

    @property
    def emitted(self) -> list[str]:
        return [word for word, kind, _ in self.said if kind != "dropped"]

    @property
    def num_kept(self) -> int:
        """Rows whose KV belongs to the sequence: all but those of drafts that were not accepted."""
        return len(self.known) + max(len(self.emitted) - 1, 0)


LANES = [
    Lane(
        "prompt chunk",
        "4 of the 7 tokens left",
        ["<s>"],
        ["Tell", "me", "about", "tea"],
        ["and", "its", "trade"],
        [],
        [],
    ),
    Lane(
        "plain decode",
        "no drafts",
        ["<s>", "A", "tale:"],
        ["Once"],
        [],
        [],
        [("upon", "sampled", "the target’s next token")],
    ),
    Lane(
        "verification",
        "4 drafts",
        ["The", "cat"],
        ["sat"],
        [],
        ["on", "the", "mat", "and"],
        [
            ("on", "accepted", "is draft 1: accepted"),
            ("the", "accepted", "is draft 2: accepted"),
            ("rug", "recovered", "not draft 3, “mat”: recovered"),
            ("", "dropped", "after a rejection: dropped"),
            ("", "dropped", "dropped"),
        ],
    ),
    Lane(
        "verification",
        "3 drafts",
        ["<s>", "Hamlet", "asks", ":"],
        ["to"],
        [],
        ["be", "or", "not"],
        [
            ("be", "accepted", "is draft 1: accepted"),
            ("or", "accepted", "is draft 2: accepted"),
            ("not", "accepted", "is draft 3: accepted"),
            ("to", "bonus", "all accepted: a bonus token"),
        ],
    ),
]


def text(ax: Axes, x: float, y: float, content: str, size: float = 11, **style: Any) -> None:
    style = {"color": INK, "family": SANS, "va": "center", "ha": "left", **style}
    ax.text(x, y, content, fontsize=size, **style)


def box(ax: Axes, x: float, y: float, width: float, height: float, radius: float, **style: Any) -> None:
    shape = f"round,pad=0,rounding_size={radius}"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **style))


def chip(ax: Axes, x: float, y: float, word: str, kind: str) -> None:
    """A token centred on `y`."""
    fill, edge, ink = KINDS[kind]
    dashed = (0, (3, 2)) if kind == "draft" else "solid"
    box(ax, x, y - CHIP_HEIGHT / 2, CHIP_WIDTH, CHIP_HEIGHT, 5, facecolor=fill, edgecolor=edge, linestyle=dashed)
    text(ax, x + CHIP_WIDTH / 2, y - 0.5, word, 10.5, family=MONO, ha="center", color=ink)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = FAINT) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>,head_length=5,head_width=2.6", color=color, linewidth=1.2, shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def lane_rows() -> list[list[float]]:
    """The centre of every row, by lane."""
    y, rows = 176.0, []
    for lane in LANES:
        rows.append([y + ROW * row for row in range(lane.num_rows)])
        y += ROW * lane.num_rows + 17
    return rows


def draw_headers(ax: Axes) -> None:
    columns = [
        (LEFT, "1", "propose", "the proposer drafts up to k tokens\nfor each sequence"),
        (TARGET_X - 4, "2", "verify", "one forward pass\nof the target"),
        (OUTPUT_X, "3", "reject", "keep what the target would have said,\nup to the first difference"),
        (COMMIT_X, "4", "commit", "num_computed_tokens (▾) moves;\nno KV is copied or erased"),
    ]
    for x, number, name, what in columns:
        ax.add_patch(plt.Circle((x + 9, 90), 9.5, facecolor=INK, edgecolor="none"))
        text(ax, x + 9, 89.6, number, 10.5, color="#ffffff", ha="center", weight="bold")
        text(ax, x + 25, 90, name, 15, weight="bold")
        text(ax, x, 124, what, 9.6, color=SOFT, linespacing=1.35)


def draw_inputs(ax: Axes, lane: Lane, rows: list[float]) -> None:
    middle = (rows[0] + rows[-1]) / 2
    text(ax, LEFT, middle - 8, lane.title, 12.5, weight="bold")
    text(ax, LEFT, middle + 9, lane.note, 9.6, color=KINDS["draft"][1] if lane.drafts else SOFT)
    bracket = INPUT_X - 18
    top, bottom = rows[0] - CHIP_HEIGHT / 2, rows[-1] + CHIP_HEIGHT / 2
    ax.plot([bracket + 6, bracket, bracket, bracket + 6], [top, top, bottom, bottom], color=FAINT, linewidth=1.2)
    for index, (y, word) in enumerate(zip(rows, lane.known + lane.drafts, strict=True)):
        chip(ax, INPUT_X, y, word, "known" if index < len(lane.known) else "draft")
        arrow(ax, (INPUT_X + CHIP_WIDTH + 5, y), (TARGET_X - 3, y))


def draw_target(ax: Axes, rows: list[list[float]]) -> None:
    top, bottom = rows[0][0] - 22, rows[-1][-1] + 22
    box(ax, TARGET_X, top, TARGET_END - TARGET_X, bottom - top, 12, facecolor=INK, edgecolor="none")
    middle, centre = (top + bottom) / 2, (TARGET_X + TARGET_END) / 2
    text(ax, centre, middle - 24, "target", 15, color="#ffffff", ha="center", weight="bold")
    text(ax, centre, middle + 10, "14 rows,\none ragged\nbatch", 10, color="#cbd5e1", ha="center", linespacing=1.35)
    num_rows = 0
    for lane_rows_ in rows:
        num_rows += len(lane_rows_)
        if lane_rows_ is not rows[-1]:
            boundary = lane_rows_[-1] + ROW / 2 + 8.5
            ax.plot([TARGET_X + 10, TARGET_END - 10], [boundary, boundary], color="#475569", linewidth=0.9)


def draw_outputs(ax: Axes, lane: Lane, rows: list[float]) -> None:
    if not lane.said:
        middle = (rows[0] + rows[-1]) / 2
        text(ax, OUTPUT_X, middle - 8, "nothing to sample:", 10, color=SOFT)
        text(ax, OUTPUT_X, middle + 8, "the prompt goes on in the next step", 10, color=SOFT)
        return
    for y, (word, kind, remark) in zip(rows[len(lane.known) - 1 :], lane.said, strict=True):
        ink = KINDS[kind][2]
        if kind == "dropped":
            text(ax, OUTPUT_X + CHIP_WIDTH / 2, y, "–", 11, color=FAINT, ha="center")
            text(ax, OUTPUT_X + CHIP_WIDTH + 12, y, remark, 9.6, color=KINDS["dropped"][2])
            continue
        arrow(ax, (TARGET_END + 4, y), (OUTPUT_X - 5, y))
        chip(ax, OUTPUT_X, y, word, kind)
        text(ax, OUTPUT_X + CHIP_WIDTH + 12, y, remark, 9.6, color=ink)


def cell(ax: Axes, x: float, y: float, width: float, height: float, name: str, word: str = "") -> None:
    """A KV slot whose upper left corner is (x, y), with the token that it holds."""
    fill, edge, ink = CELLS[name]
    dashed = (0, (2, 2)) if name == "ahead" else "solid"
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linestyle=dashed))
    text(ax, x + width / 2, y + height / 2 - 0.5, word, 8.2, family=MONO, ha="center", color=ink)


def draw_commit(ax: Axes, lane: Lane, rows: list[float]) -> None:
    """KV slots after the step; a rejected draft's slot keeps its KV until the next step writes over it."""
    computed = lane.computed + lane.known + lane.emitted[:-1]
    rejected = lane.drafts[lane.num_kept - len(lane.known) :]
    ahead = [] if rejected else lane.ahead + lane.emitted[-1:]
    names = ["before"] * len(lane.computed) + ["now"] * lane.num_kept
    names += ["rejected"] * len(rejected) + ["ahead"] * len(ahead)
    y = (rows[0] + rows[-1]) / 2 - CELL_HEIGHT / 2 + 4
    for index, (name, word) in enumerate(zip(names, computed + rejected + ahead, strict=True)):
        cell(ax, COMMIT_X + index * CELL_WIDTH, y, CELL_WIDTH - 3, CELL_HEIGHT, name, word)
    mark = COMMIT_X + len(computed) * CELL_WIDTH - 1.5
    ax.add_patch(Polygon([(mark, y - 3), (mark - 4.5, y - 10), (mark + 4.5, y - 10)], facecolor=INK, edgecolor="none"))
    text(ax, mark + 9, y - 8, f"{len(lane.computed)} → {len(computed)}", 9.6)
    num = len(lane.emitted)
    stream = f"{num} token{'s' if num > 1 else ''} to the client: “{' '.join(lane.emitted)}”" if num else "no token yet"
    text(ax, COMMIT_X, y + CELL_HEIGHT + 12, stream, 9.6, color=INK if num else SOFT)


def draw_loop(ax: Axes) -> None:
    """The scheduler before and after the step; the step itself is the panel below."""
    y = 34
    parts = [
        (LEFT, "scheduler.schedule()", True),
        (248, "StepPlan", False),
        (398, "Worker.speculative_step()", True),
        (648, "StepResult", False),
        (788, "scheduler.update()", True),
    ]
    for x, name, call in parts:
        text(ax, x, y, name, 10.5, family=MONO, weight="bold" if call else "normal", color=INK if call else SOFT)
    text(ax, 988, y, "streams to clients", 10.5)
    for start, end in ((178, 238), (310, 388), (570, 638), (724, 778), (916, 978)):
        arrow(ax, (start, y), (end, y), SOFT)


def draw_legend(ax: Axes, y: float) -> None:
    text(ax, COMMIT_X - 288, y, "KV slots:", 9.2, color=SOFT)
    entries = [
        (COMMIT_X - 232, "before", "computed before"),
        (COMMIT_X - 120, "now", "computed now, kept"),
        (COMMIT_X + 10, "rejected", "of rejected drafts: written over next"),
        (COMMIT_X + 222, "ahead", "known, not computed yet"),
    ]
    for x, name, label in entries:
        cell(ax, x, y - 6, 13, 12, name)
        text(ax, x + 19, y, label, 9.2, color=SOFT)


def draw() -> plt.Figure:
    figure = plt.figure(figsize=(WIDTH / 72, HEIGHT / 72))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    ax.axis("off")
    box(ax, 2, 2, WIDTH - 4, HEIGHT - 4, 16, facecolor=CARD, edgecolor=RULE, linewidth=1.2)
    box(ax, 16, 62, WIDTH - 32, HEIGHT - 78, 10, facecolor=PAPER, edgecolor="#e2e8f0")
    rows = lane_rows()
    draw_loop(ax)
    draw_headers(ax)
    draw_target(ax, rows)
    for lane, lane_rows_ in zip(LANES, rows, strict=True):
        draw_inputs(ax, lane, lane_rows_)
        draw_outputs(ax, lane, lane_rows_)
        draw_commit(ax, lane, lane_rows_)
    draw_legend(ax, HEIGHT - 34)
    return figure


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "forerun", "hatch.linewidth": 0.7, "axes.unicode_minus": False})
    path = Path(__file__).with_name("step.svg")
    draw().savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    print(path)


if __name__ == "__main__":
    main()
