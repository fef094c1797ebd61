"""Another engine in an environment of its own, told over a pipe what to run."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import process_tree, process_tree_memory
from benchmarks.workloads import matching_prefix

RUNNERS = Path(__file__).with_name("peers")
PEERS = tuple(sorted(path.name.removesuffix("_runner.py") for path in RUNNERS.glob("*_runner.py")))


@dataclass(frozen=True)
class PeerRun:
    """One wave: new tokens of each prompt, and the seconds from its first prompt to its last token."""

    token_ids: list[list[int]]
    wall_s: float


class PeerProcess:
    """Loads once; stands still whenever it is not asked, so that its threads take nothing from us.

    Raises RuntimeError where the peer ends before it has answered; what it printed is in `log`.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to answer
            )
        hello = self._receive()
        self.version: str = hello["version"]
        self.loaded_s: float = hello["loaded_s"]
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], num_new_tokens: int) -> PeerRun:
        """Continues the prompts together.

        Raises RuntimeError for an answer of other lengths than were asked for.
        """
        with self._awake():
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_new_tokens": num_new_tokens}) + "\n")
            self._process.stdin.flush()
            answer = self._receive()
        run = PeerRun(**answer)
        if [len(token_ids) for token_ids in run.token_ids] != [num_new_tokens] * len(prompts):
            lengths = sorted(set(map(len, run.token_ids)))
            raise RuntimeError(f"the peer was asked for {num_new_tokens} tokens a prompt and gave {lengths}")
        return run

    def peak_memory_bytes(self) -> int:
        return process_tree_memory(self._process.pid).peak_rss_bytes

    def close(self) -> None:
        """Ends the peer with all its children."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """To the peer and all its descendants, some of which may lead process groups of their own."""
        if self._process.poll() is None:
            for pid in process_tree(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last_words = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the peer ended without an answer (exit status {self._process.wait()}):\n{last_words}")
        return json.loads(line)


def mean_matching_prefix(outputs: list[list[int]], references: list[list[int]]) -> float:
    """Tokens until an output leaves its reference, on average."""
    return sum(matching_prefix(a, b) for a, b in zip(outputs, references, strict=True)) / len(outputs)
