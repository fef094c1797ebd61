"""What is said while a replica waits for nodes."""

import asyncio
import logging
from typing import Any

import pytest

from app.config import AppConfig
from app.serve import pending

NODES = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 2.0}}]


async def wait(nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, replicas_answer: Any = None) -> Any:
    monkeypatch.setattr(pending, "PENDING_PERIOD_S", 0.02)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    spread = {"placement_group_strategy": "STRICT_SPREAD", "wait_for_nodes": True}
    config = AppConfig(model="some/model", tensor_parallel_size=2, deployment_config=spread)

    async def answer() -> Any:
        await asyncio.sleep(0.3)
        if isinstance(replicas_answer, Exception):
            raise replicas_answer
        return replicas_answer

    return await pending.await_replica(answer(), config)


async def test_what_the_cluster_lacks_is_said_until_the_replica_answers(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "ray.serve"):
        assert await wait(NODES, monkeypatch, "here") == "here"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) > 1
    assert all("each on a node of its own are needed, and 1 node with 2 CPU hold 1" in line for line in said)
    assert said[0].startswith("Waiting for nodes since 0 s: 2 bundles of 1 CPU")


async def test_a_replica_that_only_loads_is_waited_for_in_silence(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "ray.serve"):
        assert await wait([NODES[0], NODES[0]], monkeypatch, "here") == "here"
    assert caplog.records == []


async def test_a_replicas_failure_is_raised(monkeypatch):
    with pytest.raises(RuntimeError, match="no such weights"):
        await wait(NODES, monkeypatch, RuntimeError("no such weights"))
