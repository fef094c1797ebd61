"""A wait for replicas that is not silent where the cluster cannot hold them yet."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

import ray

from app.config import AppConfig
from app.serve.placement import missing, rank_bundles

logger = logging.getLogger("ray.serve")

PENDING_PERIOD_S = 10.0
"""How often a start that waits says what it waits for."""

Answer = TypeVar("Answer")


async def await_replica(answer: Awaitable[Answer], config: AppConfig) -> Answer:
    """A replica's answer; until it comes, a line every `PENDING_PERIOD_S` on what the cluster lacks."""
    start, task = time.monotonic(), asyncio.ensure_future(answer)
    while True:
        done, _ = await asyncio.wait([task], timeout=PENDING_PERIOD_S)
        if done:
            return task.result()
        short = await asyncio.to_thread(_missing, config)
        if short:
            logger.info("Waiting for nodes since %.0f s: %s", time.monotonic() - start, short)


def _missing(config: AppConfig) -> str:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundles = rank_bundles(config, has_gpus=any(node.get("GPU", 0) > 0 for node in nodes))
    return missing(bundles, config.deployment_config.placement_group_strategy, nodes)
