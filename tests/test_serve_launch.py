"""What `make serve` says: the line when the server is ready, and the reason when it is not."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ApplicationStatus

from app.serve import launch
from app.serve.config_file import ServeFile
from app.serve.launch import RAY_DEFAULTS, Announcer


@pytest.fixture
def file(tmp_path: Path) -> ServeFile:
    content = {
        "http_options": {"host": "0.0.0.0", "port": 8123},
        "applications": [
            {
                "name": "chat",
                "route_prefix": "/chat",
                "import_path": "app.main:build",
                "args": {"model": "some/model", "served_model_name": "it's a model"},
            }
        ],
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return ServeFile(path)


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(launch, "POLL_PERIOD_S", 0.0)
    return sent


def script(monkeypatch: pytest.MonkeyPatch, *answers: tuple[ApplicationStatus, str] | None) -> None:
    remaining = list(answers)
    monkeypatch.setattr(launch, "_application", lambda name: remaining.pop(0))


def test_what_the_environment_says_to_ray_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RAY_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "7")
    launch.tell_ray()
    assert {name: os.environ[name] for name in RAY_DEFAULTS} == RAY_DEFAULTS | {"RAY_worker_niceness": "7"}


def test_where_batch_scheduling_is_refused_it_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    launch.schedule_as_batch()
    assert "Operation not permitted" in capsys.readouterr().err


def test_the_ready_line_can_be_pasted(
    file: ServeFile,
    interrupts: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = (ApplicationStatus.RUNNING, "")
    script(monkeypatch, None, (ApplicationStatus.DEPLOYING, ""), running, running)
    health = [False, True]
    asked: list[str] = []
    monkeypatch.setattr(launch, "_answers", lambda url: asked.append(url) or health.pop(0))
    Announcer(file, []).run()
    assert asked == ["http://127.0.0.1:8123/chat/health"] * 2
    [line] = [line for line in capsys.readouterr().out.splitlines() if line]
    said, command = line.split(" — try: ")
    assert said == "it's a model is ready at http://127.0.0.1:8123/chat/v1"
    curl, url, *options = shlex.split(command)
    assert (curl, url) == ("curl", "http://127.0.0.1:8123/chat/v1/chat/completions")
    assert json.loads(options[options.index("-d") + 1])["model"] == "it's a model"
    assert not interrupts


def test_a_failed_start_is_interrupted_with_its_last_line(
    file: ServeFile, interrupts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "Traceback (most recent call last):\n  File ...\nValueError: args.block_size is 7: use another\n\n"
    script(monkeypatch, (ApplicationStatus.DEPLOYING, ""), (ApplicationStatus.DEPLOY_FAILED, message))
    announcer = Announcer(file, [])
    announcer.run()
    assert announcer.failure == "ValueError: args.block_size is 7: use another"
    assert interrupts == [(os.getpid(), signal.SIGINT)]


def test_a_command_runs_once_it_is_ready_and_ends_the_server(
    file: ServeFile, interrupts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, (ApplicationStatus.RUNNING, ""))
    monkeypatch.setattr(launch, "_answers", lambda url: True)
    announcer = Announcer(file, [sys.executable, "-c", "import sys; sys.exit(3)"])
    announcer.run()
    assert announcer.command_status == 3
    assert interrupts == [(os.getpid(), signal.SIGINT)]
