"""Replicas counted from outside, over REST, with the shipped Serve file and a tiny model."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.serve_process import REPOSITORY, ServeProcess

pytestmark = [pytest.mark.timeout(240), pytest.mark.cluster]


@pytest.fixture
def server(tiny_checkpoint: Callable[..., Path]) -> Iterator[ServeProcess]:
    process = ServeProcess.of_file(REPOSITORY / "serve_configs" / "external_scaler.yaml")
    args = process.content["applications"][0]["args"]
    args |= {"model": str(tiny_checkpoint("llama")), "dtype": "float32", "max_model_len": 64, "kv_cache_memory": "auto"}
    process.start()
    yield process
    assert process.stop() == [], "Ctrl-C must leave no process behind"


def scale(server: ServeProcess, application: str, num_replicas: int) -> None:
    request = urllib.request.Request(
        f"{server.dashboard_url}/api/v1/applications/{application}/deployments/TargetReplica/scale",
        json.dumps({"target_num_replicas": num_replicas}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def until_replicas_answer(server: ServeProcess, num: int) -> None:
    deadline = time.monotonic() + 90
    while True:
        with urllib.request.urlopen(f"{server.url}/stats", timeout=30) as response:
            replicas = json.load(response)["replicas"]
        if len(replicas) == num:
            return
        assert time.monotonic() < deadline, f"{len(replicas)} replicas answer"
        time.sleep(0.2)


def test_rest_scales_the_replicas_and_nothing_else_does(server: ServeProcess) -> None:
    until_replicas_answer(server, 1)
    scale(server, "default", 2)
    until_replicas_answer(server, 2)
    scale(server, "default", 1)
    until_replicas_answer(server, 1)
    with pytest.raises(urllib.error.HTTPError) as raised:
        scale(server, "elsewhere", 2)
    assert raised.value.code == 404
