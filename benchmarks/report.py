"""How benchmarks print: what was measured on what, aligned tables, and one last line of JSON."""

import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import REPOSITORY, Machine


def print_header(machine: Machine, model: str, **details: str) -> None:
    rows = {"machine": str(machine), "model": model, "command": command_line(), "commit": machine.commit, **details}
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    print(flush=True)


def command_line() -> str:
    """What this process was started with, its file named from the repository's root."""
    program = Path(sys.argv[0]).resolve()
    name = program.relative_to(REPOSITORY) if program.is_relative_to(REPOSITORY) else program
    return shlex.join(["python", str(name), *sys.argv[1:]])


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 2) -> str:
    """Columns two blanks apart; the first `num_left` are aligned left, the others right."""
    lines = [[str(cell) for cell in line] for line in (headers, *rows)]
    assert all(len(line) == len(headers) for line in lines), "every row needs a cell for every header"
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    text = []
    for line in lines:
        cells = [
            f"{c:<{w}}" if i < num_left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def number(value: float | None, digits: int = 0, suffix: str = "") -> str:
    """A figure for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1]


def paired_ratio(values: Sequence[float], baselines: Sequence[float]) -> float | None:
    """Median of the ratios within each round: drift between rounds cancels."""
    return median([value / baseline for value, baseline in zip(values, baselines, strict=True) if baseline > 0])


def print_json(result: dict[str, Any], out: Path | None) -> None:
    """The result as the last line of the output, and in a file where asked."""
    text = json.dumps(result, default=_plain)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    print(text, flush=True)


def last_json(output: str) -> dict[str, Any]:
    """The result in a benchmark's output.

    Raises ValueError where the last line is no JSON object.
    """
    lines = output.strip().splitlines()
    result = json.loads(lines[-1]) if lines else None
    if not isinstance(result, dict):
        raise ValueError("the last line of the output is not a JSON object")
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
