"""What replicas wait for that are wanted and have no place: said for as long as it lasts."""

import asyncio
import logging
import time

import ray
from ray.serve.context import _get_global_client

from app.config import AppConfig
from app.serve.placement import missing, rank_bundles

logger = logging.getLogger("ray.serve")

PENDING_PERIOD_S = 10.0
"""How often it is said what is waited for."""


async def watch_replicas(config: AppConfig, app_name: str, deployment_name: str) -> None:
    """Never returns: a line every `PENDING_PERIOD_S` while fewer replicas have a place than are wanted."""
    last_whole = time.monotonic()
    while True:
        await asyncio.sleep(PENDING_PERIOD_S)
        try:
            num_placed, num_wanted = await asyncio.to_thread(count_replicas, app_name, deployment_name)
            short = await asyncio.to_thread(_missing, config, num_wanted) if num_placed < num_wanted else ""
        except Exception as error:  # Serve's controller is being replaced, or the deployment, or Ray's head is away
            logger.debug("It is not known what replicas wait for: %s", error)
            continue
        waited_s = time.monotonic() - last_whole
        if num_placed >= num_wanted:
            last_whole = time.monotonic()
        elif short:
            logger.info("Waiting for nodes since %.0f s: %s", waited_s, short)
        elif waited_s > 1.5 * PENDING_PERIOD_S:  # a process that only starts has one by then
            logger.info(
                "Waiting for a place since %.0f s: %d of %d replicas have one, and the nodes could hold all of them, "
                "but for what else is on them: compare `ray status`",
                waited_s,
                num_placed,
                num_wanted,
            )


def count_replicas(app_name: str, deployment_name: str) -> tuple[int, int]:
    """How many replicas have a process on some node, and how many there should be."""
    client = _get_global_client()
    assert client is not None, "a replica asks"
    details = client.get_serve_details()
    deployment = details["applications"][app_name]["deployments"][deployment_name]
    placed = [each for each in deployment["replicas"] if each.get("node_id") and each["state"] != "STOPPING"]
    return len(placed), deployment["target_num_replicas"]


def _missing(config: AppConfig, num_replicas: int) -> str:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundles = rank_bundles(config, has_gpus=any(node.get("GPU", 0) > 0 for node in nodes))
    return missing(bundles, config.deployment_config.placement_group_strategy, nodes, num_replicas)
