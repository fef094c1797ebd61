"""Shared fixtures: small random checkpoints, made once a session."""

import os
from pathlib import Path

import pytest
import torch

from kernels.cpu import threads
from tests.helpers.recovery import TIME_TO_RECOVER
from tests.helpers.tiny_models import make_tiny_checkpoint

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # with Ray's 15, whatever computes beside tests stops them


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have recorded of the time that the server takes to recover."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == TIME_TO_RECOVER:
                terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    """Tiny models only lose by more, most of all on a busy machine; tests of the split ask for their own."""
    threads._chosen = None
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_checkpoint(architecture, seed, **overrides)` -> folder, built once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(architecture: str = "llama", seed: int = 0, **overrides: int) -> Path:
        folder = root / "-".join([architecture, str(seed), *(f"{name}{value}" for name, value in overrides.items())])
        if not folder.exists():
            make_tiny_checkpoint(folder, architecture=architecture, seed=seed, **overrides)
        return folder

    return checkpoint
