"""Prints what an image installs, a requirement a line: `python requirements.py cpu|cuda`, beside pyproject.toml.

The project's own dependencies, without its code, so that a change of code installs nothing anew. Without a GPU nothing
imports Triton, and 0.7 GB need not be carried.
"""

import sys
import tomllib
from pathlib import Path

VARIANTS = ("cpu", "cuda")


def requirements(pyproject: Path, variant: str) -> list[str]:
    """Raises ValueError for a variant that there is not."""
    if variant not in VARIANTS:
        raise ValueError(f"VARIANT is {variant!r}: use {' or '.join(VARIANTS)}")
    declared: list[str] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [line for line in declared if variant == "cuda" or not line.startswith("triton")]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1])))
