"""`serve run serve_configs/two_ranks.yaml`, as it is: a gang that answers, and that leaves nothing behind."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.serve.launch import RAY_DEFAULTS
from tests.helpers.gang_cluster import wait_for
from tests.helpers.leftovers import abandoned_shared_memory, listening_sockets, shared_memory, sockets_of
from tests.helpers.serve_process import REPOSITORY, ServeProcess

MODEL = "tiny-deepseek-v3"
HELDOUT = json.loads((REPOSITORY / "tests" / "assets" / MODEL / "heldout.json").read_text())

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster]


@pytest.fixture
def shared_before() -> set[str]:
    return shared_memory()


@pytest.fixture
def server() -> Iterator[ServeProcess]:
    process = ServeProcess.of_file(REPOSITORY / "serve_configs" / "two_ranks.yaml")
    process.start()
    yield process
    process.stop()


def complete(server: ServeProcess, prompt: list[int], **fields: object) -> dict:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_two_ranks_answer_and_leave_nothing_behind(shared_before: set[str], server: ServeProcess) -> None:
    ranks = server.pids("ray::RankActor")
    assert len(ranks) == 2
    priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in ranks}
    assert priorities == {os.getpriority(os.PRIO_PROCESS, 0)}, "ranks must not stand back behind other processes"
    policies = {os.sched_getscheduler(pid) for pid in (*ranks, *server.pids("ray::Serve"))}
    assert policies == {os.SCHED_BATCH}, "what wakes up must not interrupt a rank"
    replicas = server.pids("ray::ServeReplica")
    assert len(replicas) == 2, "the target's and the ingress's"
    for pid in replicas:
        told = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        assert {f"{name}={value}" for name, value in RAY_DEFAULTS.items()} <= set(told)
    drafted = complete(server, HELDOUT["prompt_ids"][0], include_speculation_metrics=True)
    plain = complete(server, HELDOUT["prompt_ids"][0], speculative={"num_speculative_tokens": 0})
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"] != ""
    assert drafted["speculation_metrics"]["accepted"] > 0

    opened = sockets_of(server.pids()) & listening_sockets()
    assert opened
    assert server.stop() == [], "Ctrl-C must leave no process behind"
    assert not opened & listening_sockets(), "Ctrl-C must leave no port open"
    wait_for(lambda: not abandoned_shared_memory(shared_before), limit_s=10, what="an end of all shared memory")
