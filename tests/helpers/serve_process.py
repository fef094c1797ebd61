"""A real `serve run` in processes of its own, for tests that speak HTTP."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


class ServeProcess:
    """The application of one Serve file on 127.0.0.1, with Ray's files in a folder of its own."""

    def __init__(self, args: dict[str, Any], user_config: dict[str, Any] | None = None) -> None:
        # Short: Ray makes sockets below it, whose paths are limited to 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.content = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "default",
                    "route_prefix": "/",
                    "import_path": "app.main:build",
                    "args": args,
                    "deployments": [{"name": "TargetReplica", "user_config": user_config or {}}],
                }
            ],
        }
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_file(cls, path: Path) -> "ServeProcess":
        """A Serve file as it is, but for the port."""
        content = yaml.safe_load(path.read_text())
        process = cls({})
        content["http_options"]["port"] = process.port
        process.content = content
        return process

    def start(self) -> None:
        """Returns when the server has said that it is ready. Raises RuntimeError with its output if it never does."""
        path = self._folder / "serve.yaml"
        path.write_text(yaml.safe_dump(self.content))
        # What Ray is told is the launcher's to say.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"RAY_TMPDIR": str(self._folder), "RAY_AUTH_MODE": "disabled"}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app.serve.launch", str(path)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while f"is ready at {self.url}/v1" not in self.log:
            if self._process.poll() is not None or time.monotonic() > deadline:
                output = self.log
                self.stop()
                raise RuntimeError(f"the server did not start:\n{output}")
            time.sleep(0.1)

    def stop(self) -> list[int]:
        """Interrupts the server as Ctrl-C would; the processes that it left behind, which are ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        deadline = time.monotonic() + 5
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        return left

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def dashboard_url(self) -> str:
        found = re.search(r"View the dashboard at \D*(127\.0\.0\.1:\d+)", re.sub(r"\x1b\[[\d;]*m", "", self.log))
        assert found is not None
        return f"http://{found[1]}"

    def stats(self) -> dict[str, Any]:
        """Of the only replica; waits where none runs for the moment."""
        deadline = time.monotonic() + 30
        while True:
            with urllib.request.urlopen(f"{self.url}/stats", timeout=30) as response:
                replicas: list[dict[str, Any]] = json.load(response)["replicas"]
            if len(replicas) == 1:
                return replicas[0]
            assert time.monotonic() < deadline, f"{len(replicas)} replicas answered"
            time.sleep(0.05)

    def deploy(self, user_config: dict[str, Any]) -> None:
        """As `serve deploy` with another user_config."""
        self.content["applications"][0]["deployments"][0]["user_config"] = user_config
        request = urllib.request.Request(
            f"{self.dashboard_url}/api/serve/applications/",
            json.dumps(self.content).encode(),
            {"Content-Type": "application/json"},
            method="PUT",
        )
        urllib.request.urlopen(request, timeout=30).close()

    def pids(self, title: str = "") -> list[int]:
        """Of this server's processes, Ray's included, whose command line holds `title`."""
        mark = f"RAY_TMPDIR={self._folder}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if (
                    folder.name.isdecimal()
                    and mark in (folder / "environ").read_bytes().split(b"\0")
                    and title.encode() in (folder / "cmdline").read_bytes()
                ):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    @property
    def _log_path(self) -> Path:
        return self._folder / "serve.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
