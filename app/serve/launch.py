"""`make serve`: checks a Serve file, hands it to `serve run`, and says when it is ready.

    python -m app.serve.launch SERVE_FILE [COMMAND...]

With a command, runs it once the server is ready, and stops the server after it. `serve run` alone serves
as well; it reports readiness and mistakes among its log lines.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import run as serve_run

from app.serve.config_file import ServeFile

POLL_PERIOD_S = 0.25
RAY_DEFAULTS = {
    # Ray reports its use to its makers unless told otherwise; that is the user's to switch on.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers at nice 15, where whatever else computes on this machine takes their time from them.
    "RAY_worker_niceness": "0",
    # A streamed delivery costs the processes on its way less than half: by gRPC from deployment to deployment rather
    # than as an object of Ray's, and without a change of threads in each. Where the model's threads have no more cores
    # than they use, whatever those processes take delays all of them. These are switches of Serve's own, which its
    # RAY_SERVE_THROUGHPUT_OPTIMIZED sets, too. For one machine: a node that falls silent ends a call of Ray's soon, and
    # one of gRPC's after minutes.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Serve's controller looks around, and each process hands over what it has counted, ten times a second otherwise.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}
"""What Ray is told where the environment says nothing else."""


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python -m app.serve.launch SERVE_FILE [COMMAND...]", file=sys.stderr)
        return 2
    path, command = Path(arguments[0]), arguments[1:]
    try:
        file = ServeFile(path)
        _check_port(file.host, file.port)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    tell_ray()
    schedule_as_batch()
    # Each stops the server in good order, also where a shell has told its background jobs to ignore the first.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    announcer = Announcer(file, command)
    announcer.start()
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        serve_run.main(args=[str(path)], standalone_mode=False)
    if announcer.failure is not None:
        print(f"\nThe application failed to start: {announcer.failure}", file=sys.stderr)
        return 1
    return announcer.command_status


def tell_ray() -> None:
    """For the processes that Ray is going to start: this one has read its own constants when Serve was imported."""
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)


def schedule_as_batch() -> None:
    """This thread and all that it is going to start: Linux lets none that wakes up interrupt one that computes.

    What wakes up waits for its turn, some milliseconds where no core is free. Otherwise every message on its way stops
    a thread of the model, and soon those that wait for this one's share of the step.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # of a sandbox that knows no such policy, or forbids it
            print(f"Ray's processes may interrupt the model's threads: {error}", file=sys.stderr)


class Announcer(threading.Thread):
    """Waits beside `serve run` until the application answers, and prints how to ask it; interrupts a failed start."""

    def __init__(self, file: ServeFile, command: list[str]) -> None:
        super().__init__(name="announcer", daemon=True)
        self._file = file
        self._command = command
        self.command_status = 0
        self.failure: str | None = None

    def run(self) -> None:
        name = self._file.schema.applications[0].name
        while True:
            time.sleep(POLL_PERIOD_S)
            application = _application(name)
            if application is None:
                continue
            status, message = application
            if status == ApplicationStatus.DEPLOY_FAILED:
                self.failure = _last_line(message)
                break
            if status == ApplicationStatus.RUNNING and _answers(f"{self._url}/health"):
                print(f"\n{self._ready_line()}\n", flush=True)
                if not self._command:
                    return
                self.command_status = subprocess.run(self._command, check=False).returncode
                break
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C would: `serve run` cleans up

    @property
    def _url(self) -> str:
        host = "127.0.0.1" if self._file.host in ("0.0.0.0", "::") else self._file.host
        return f"http://{host}:{self._file.port}{self._file.route_prefix}"

    def _ready_line(self) -> str:
        model = self._file.configs[0].model_name
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is gravity?"}]})
        return (
            f"{model} is ready at {self._url}/v1 — try: curl {self._url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )


def _application(name: str) -> tuple[ApplicationStatus, str] | None:
    """Status and message; None until there is one."""
    if not ray.is_initialized():  # asking Serve would start a Ray of our own
        return None
    try:
        application = serve.status().applications.get(name)
    except Exception:  # until Serve is up there is nobody to ask, and Ray has several ways to say so
        return None
    if application is None:
        return None
    # Where a replica failed, its own words; the application's say only which deployment that was.
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    return application.status, (messages or [application.message])[0]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _last_line(message: str) -> str:
    """Of a traceback the line that says what went wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"http_options.port is {port}, and {host}:{port} cannot be opened ({error.strerror}): "
                "stop what uses it, or choose another port"
            ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
