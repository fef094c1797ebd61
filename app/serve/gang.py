"""The ranks of one replica: born, introduced to each other, loaded, and asked for steps together."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from ray.util.placement_group import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import AppConfig
from app.drafter_loader import DrafterDescription
from app.engine.plan import StepPlan, StepResult
from app.executor import PendingStep
from app.serve.pending import PENDING_PERIOD_S
from app.serve.placement import first_rank_options, order_of_ranks, rank_options
from app.serve.rank_actor import CONCURRENCY_GROUPS, RankActor
from app.worker_loader import LoadedModel

logger = logging.getLogger("ray.serve")

JOIN_SHARE = 0.8
"""Of `boot_timeout_s`, for ranks to meet: one that hears nobody says so before it is given up."""


class Gang:
    """An executor over rank actors: every one gets each plan, in order; rank 0 answers.

    The second plan waits in the actors' queues while they run the first, so that its way to them costs no time.
    """

    max_in_flight = 2
    num_microbatches = None

    def __init__(self, ranks: Sequence[ActorHandle]) -> None:
        self._ranks = list(ranks)
        self._lifetimes: list[ray.ObjectRef] = [rank.outlive.remote() for rank in ranks]

    def submit(self, plan: StepPlan) -> PendingStep:
        return partial(_result, [rank.speculative_step.remote(plan) for rank in self._ranks])

    def stats(self) -> dict[str, float]:
        return cast(dict[str, float], ray.get(self._ranks[0].stats.remote()))

    def check_health(self) -> None:
        """Raises Ray's own error where a rank is dead: Serve then replaces the replica at once."""
        ended, _ = ray.wait(self._lifetimes, num_returns=len(self._lifetimes), timeout=0)
        ray.get(ended)

    def shutdown(self) -> None:
        """Kills the ranks: one that waits for another in a collective would hear nothing else."""
        for rank in self._ranks:
            ray.kill(rank)


def boot(config: AppConfig, drafter: DrafterDescription | None = None) -> tuple[Gang, LoadedModel]:
    """Starts a gang in this replica's placement group, a bundle a rank; `drafter` is that of a draft actor.

    Raises what a rank raised, TimeoutError where the ranks do not meet in time.
    """
    group = get_current_placement_group()
    assert group is not None, "the deployment asks for a bundle a rank"
    nodes = placement_group_table(group)["bundles_to_node_id"]
    bundle_nodes = [nodes[bundle] for bundle in range(config.tensor_parallel_size)]
    bundles = order_of_ranks(bundle_nodes, ray.get_runtime_context().get_node_id())
    num_on_node = Counter(bundle_nodes)
    actor_class: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)  # type: ignore[call-overload]
    ranks: list[ActorHandle] = [
        actor_class.options(
            **(rank_options if rank else first_rank_options)(config, has_gpus="GPU" in group.bundle_specs[bundle]),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote(rank, config)
        for rank, bundle in enumerate(bundles)
    ]
    try:
        return _introduce(config, ranks, [num_on_node[bundle_nodes[bundle]] for bundle in bundles], drafter)
    except BaseException as error:
        for rank in ranks:
            ray.kill(rank)
        if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):  # a mistake of the user's
            raise ValueError(str(error.cause)) from error
        raise


def _introduce(
    config: AppConfig, ranks: list[ActorHandle], num_on_host: list[int], drafter: DrafterDescription | None
) -> tuple[Gang, LoadedModel]:
    start = time.monotonic()
    limit_s = config.boot_timeout_s
    rendezvous = _await([ranks[0].open_store.remote()], "rank 0 to start", limit_s)[0]
    joins = [
        rank.join.remote(rendezvous, num, JOIN_SHARE * limit_s) for rank, num in zip(ranks, num_on_host, strict=True)
    ]
    addresses = _await(joins, f"{len(ranks)} ranks to meet at {rendezvous.host}:{rendezvous.port}", limit_s)
    logger.info("Ranks 0 to %d have met after %.1f s: %s", len(ranks) - 1, time.monotonic() - start, addresses)
    loads = [rank.load.remote(num, drafter) for rank, num in zip(ranks, num_on_host, strict=True)]
    loaded = _await(loads, "weights", None)[0]
    return Gang(ranks), loaded


def _await(refs: list[ray.ObjectRef], what: str, limit_s: float | None) -> list[Any]:
    """The results in the order of `refs`; the first failure is raised at once, and a long wait is not silent."""
    start, pending = time.monotonic(), refs
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=PENDING_PERIOD_S)
        ray.get(ready)
        elapsed_s = time.monotonic() - start
        if pending and limit_s is not None and elapsed_s > limit_s:
            late = [rank for rank, ref in enumerate(refs) if ref in pending]
            raise TimeoutError(
                f"waited {elapsed_s:.0f} s for {what}, and ranks {late} have not answered: raise boot_timeout_s, "
                "or see their logs"
            )
        if pending and not ready:
            late = [rank for rank, ref in enumerate(refs) if ref in pending]
            logger.info("Waiting for %s since %.0f s; ranks %s have not answered", what, elapsed_s, late)
    return ray.get(refs)


def _result(refs: list[ray.ObjectRef]) -> StepResult:
    """Rank 0's, once every rank has done its part; a rank that fails is not waited for."""
    results: list[StepResult | None] = ray.get(refs)
    assert results[0] is not None
    return results[0]
