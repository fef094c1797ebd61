"""The drafter of one replica, in an actor of its own."""

import logging
import time
from dataclasses import replace
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import AppConfig
from app.drafter_loader import DrafterDescription, DrafterLoader
from app.engine.plan import StepPlan, StepResult
from app.serve.placement import draft_actor_options
from app.serve.priority import warn_if_held_back
from app.speculative.detached_drafter import DetachedDrafter
from app.speculative.loaded_proposer import LoadedProposer
from app.speculative.proposer import Drafts
from app.speculative.remote_proposer import RemoteProposer
from app.speculative.sequence_mirror import MirrorImage

logger = logging.getLogger("ray.serve")

RESTART_PAUSE_S = 10.0
"""Between two starts of an actor that does not come up."""


class DraftActor:
    """Holds a drafter; `draft` is its one hot method.

    Born in the bundle of rank 0, it is told in turn to `load`, and to `begin` once the target has sized its KV pool.
    """

    def __init__(self, config: AppConfig, num_threads: int) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        warn_if_held_back(logger)
        torch.set_num_threads(num_threads)
        self._config = config
        self._loader: DrafterLoader | None = None
        self._drafter: DetachedDrafter | None = None

    def load(self) -> DrafterDescription:
        """Raises ValueError for a drafter that does not fit the target."""
        self._loader = DrafterLoader(self._config)
        return self._loader.describe()

    def begin(self, num_blocks: int, image: MirrorImage) -> None:
        """Takes up sequences as they are, over a pool of `num_blocks` blocks."""
        assert self._loader is not None, "begin before `load`"
        self._drafter = self._loader.build(num_blocks, image)

    def draft(self, plan: StepPlan, results: list[StepResult]) -> Drafts:
        assert self._drafter is not None, "a plan before `begin`"
        drafts = self._drafter.draft(plan, results)
        return drafts if drafts.probs is None else replace(drafts, probs=drafts.probs.cpu())


class DraftActorClient:
    """A `RemoteDrafter`: the actor that drafts, through as many lives as it takes."""

    def __init__(self, config: AppConfig) -> None:
        """Starts the actor, in the bundle that this replica is in."""
        group = get_current_placement_group()
        assert group is not None, "the deployment asks for a bundle"
        options = draft_actor_options(config, has_gpus="GPU" in group.bundle_specs[0])
        self._options: dict[str, Any] = {
            **options,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        self._config = config
        self._num_threads = max(int(options["num_cpus"]), 1)
        self._num_blocks = 0
        self._is_closed = False
        self._failed_at: float | None = None  # the start of its present life
        self._start()

    def describe(self) -> DrafterDescription:
        """Waits until the drafter is loaded. Raises ValueError where it does not fit."""
        try:
            return cast(DrafterDescription, ray.get(self._loading))
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):  # a mistake of the user's
                raise ValueError(str(error.cause)) from error
            raise

    def set_num_blocks(self, num_blocks: int) -> None:
        """Of the target's KV pool; before the first `begin`."""
        self._num_blocks = num_blocks

    def has_started(self) -> bool:
        now = time.monotonic()
        if self._is_closed or not ray.wait([self._loading], timeout=0)[0]:
            return False
        if self._failed_at is None:
            try:
                ray.get(self._loading)
                return True
            except Exception:
                logger.exception("The draft actor does not start; it is tried again in %g s", RESTART_PAUSE_S)
                self._failed_at = now
        elif now > self._failed_at + RESTART_PAUSE_S:
            self.restart()
        return False

    def begin(self, image: MirrorImage) -> None:
        self._actor.begin.remote(self._num_blocks, image)

    def draft(self, plan: StepPlan, results: list[StepResult]) -> list[ray.ObjectRef]:
        # In a list, so that Ray hands the reference on, and does not hold the plan back until the drafts are there.
        return [self._actor.draft.remote(plan, results)]

    def restart(self) -> None:
        if not self._is_closed:
            logger.error("The draft actor has failed, or was too late; it is started anew")
            ray.kill(self._actor)
            self._start()

    def shutdown(self) -> None:
        self._is_closed = True
        ray.kill(self._actor)

    def _start(self) -> None:
        actor_class: Any = ray.remote(DraftActor)
        self._actor: ActorHandle = actor_class.options(**self._options).remote(self._config, self._num_threads)
        self._loading: ray.ObjectRef = self._actor.load.remote()
        self._failed_at = None


def received_drafts(config: AppConfig, drafter: DrafterDescription) -> LoadedProposer:
    """What stands in for the drafter on rank 0."""
    assert config.speculative_config is not None
    timeout_s = config.speculative_config.draft_timeout_s

    def receive(drafts: list[ray.ObjectRef]) -> Drafts:
        return cast(Drafts, ray.get(drafts[0], timeout=timeout_s))

    return LoadedProposer(
        kv_specs=[],
        build=lambda context: RemoteProposer(receive, drafter.states_acceptance, context.device),
        soft_drafts=drafter.soft_drafts,
        states_acceptance=drafter.states_acceptance,
        draft_cost=drafter.draft_cost,
        elsewhere_token_bytes=drafter.token_bytes,
    )
