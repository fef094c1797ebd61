"""What is said while replicas that are wanted have no place."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from app.config import AppConfig
from app.serve import pending
from app.serve.pending import watch_replicas

NODE = {"Alive": True, "Resources": {"CPU": 2.0}}
LOST = {"Alive": False, "Resources": {"CPU": 2.0}}
Counts = tuple[int, int] | Exception
"""Replicas with a place and replicas that are wanted, or what the question raises."""


async def watch(
    nodes: list[dict[str, Any]], counts: list[Counts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """What is said of one look after the other; of the last as long as it takes to be repeated."""
    looks = 0

    def count(app_name: str, deployment_name: str) -> tuple[int, int]:
        nonlocal looks
        assert (app_name, deployment_name) == ("chat", "TargetReplica")
        answer = counts[min(looks, len(counts) - 1)]
        looks += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pending, "PENDING_PERIOD_S", 0.05)
    monkeypatch.setattr(pending, "count_replicas", count)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    spread = {"placement_group_strategy": "STRICT_SPREAD"}
    config = AppConfig(model="some/model", tensor_parallel_size=2, deployment_config=spread)
    with caplog.at_level(logging.INFO, "ray.serve"), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            watching = asyncio.create_task(watch_replicas(config, "chat", "TargetReplica"))
            while looks < len(counts) + 3:
                await asyncio.sleep(0.01)
    watching.cancel()
    return [record.getMessage() for record in caplog.records]


async def test_what_the_cluster_lacks_is_said_again_and_again(monkeypatch, caplog):
    said = await watch([NODE, LOST], [(0, 1)], monkeypatch, caplog)
    assert len(said) > 1
    assert all("each on a node of its own are needed, and 1 node with 2 CPU hold 1" in line for line in said)
    assert said[0].startswith("Waiting for nodes since 0 s: 2 bundles of 1 CPU")


async def test_a_node_that_is_lost_later_is_missed_too(monkeypatch, caplog):
    said = await watch([NODE], [(1, 1), RuntimeError("no controller"), (1, 1), (0, 1)], monkeypatch, caplog)
    assert said
    assert all(line.startswith("Waiting for nodes") for line in said)


async def test_every_replica_that_is_wanted_counts(monkeypatch, caplog):
    nodes = [NODE, {"Alive": True, "Resources": {"CPU": 1.0}}]
    said = await watch(nodes, [(1, 2)], monkeypatch, caplog)
    assert said[0].endswith(
        "2 x 2 bundles of 1 CPU, each on a node of its own are needed, and 2 nodes with 2 CPU; 1 CPU hold 3"
    )


async def test_a_place_that_others_hold_is_told_apart_from_one_that_is_not_there(monkeypatch, caplog):
    said = await watch([NODE, NODE], [(0, 1)], monkeypatch, caplog)
    assert said[0].startswith("Waiting for a place since 0 s: 0 of 1 replicas have one, and the nodes could hold all")


async def test_what_has_a_place_is_waited_for_in_silence(monkeypatch, caplog):
    assert await watch([NODE], [(1, 1)], monkeypatch, caplog) == []
    assert await watch([NODE], [(0, 0)], monkeypatch, caplog) == []


async def test_a_place_that_is_just_being_taken_is_not_worth_a_line(monkeypatch, caplog):
    assert await watch([NODE, NODE], [(0, 1), (1, 1)], monkeypatch, caplog) == []
