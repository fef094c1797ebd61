"""One rank of a gang, in an actor of its own."""

import logging
import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from app.config import AppConfig
from app.drafter_loader import DrafterDescription
from app.engine.plan import StepPlan, StepResult
from app.follower import Follower
from app.own_thread import run_in_own_thread
from app.serve.draft_actor import received_drafts
from app.serve.host_interface import interface_of
from app.serve.priority import warn_if_held_back
from app.serve.step_thread import StepThread
from app.worker import Worker
from app.worker_loader import LoadedModel, load_follower, load_worker, select_device
from models.parallel import TensorParallelGroup, set_tensor_parallel_group

logger = logging.getLogger(__name__)

LIFETIME_GROUP, CONTROL_GROUP, STEP_GROUP = "lifetime", "control", "steps"
CONCURRENCY_GROUPS = {LIFETIME_GROUP: 1, CONTROL_GROUP: 1, STEP_GROUP: 2}  # a step, and the next one's plan
LOADING_LIMIT = timedelta(days=1)  # ranks that have loaded wait for those that read from a slower disk, or download
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # one that is set stays as it is


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a gang meet: a store in the process of rank 0."""

    host: str
    port: int


class RankActor:
    """Holds a worker or a follower; `speculative_step` is its one hot method.

    Born in its bundle, it is told in turn to `open_store` (rank 0), to `join` the others, and to `load`.
    """

    def __init__(self, rank: int, config: AppConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        warn_if_held_back(logger)
        self._rank, self._config = rank, config
        self._size = config.tensor_parallel_size
        self._device = select_device(config.device)
        self._store: dist.TCPStore | None = None
        self._member: Worker | Follower | None = None
        self._steps: StepThread | None = None

    def open_store(self) -> Rendezvous:
        """On a port that the system chooses: one looked for beforehand may be taken by the time that it is needed."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return Rendezvous(host, self._store.port)

    def join(self, rendezvous: Rendezvous, num_ranks_on_host: int, timeout_s: float) -> str:
        """Meets the other ranks within `timeout_s`, and proves by known sums that they hear each other.

        Returns the node's address. Raises RuntimeError where a rank is missing or adds up wrongly.
        """
        address = ray.util.get_node_ip_address()
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, interface_of(address))
        limit = timedelta(seconds=timeout_s)
        try:
            if self._store is None:
                self._store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=limit)
            self._store.set_timeout(limit)
            self._connect(limit)
        except RuntimeError as error:
            interfaces = " and ".join(dict.fromkeys(os.environ[variable] for variable in INTERFACE_VARIABLES))
            raise RuntimeError(
                f"rank {self._rank} of {self._size} at {address} does not hear the others over {interfaces}: {error}"
            ) from error
        if self._config.num_threads is None:
            num_threads = max(len(os.sched_getaffinity(0)) // num_ranks_on_host, 1)
            self._config = self._config.model_copy(update={"num_threads": num_threads})
        return address

    def load(self, num_ranks_on_host: int, drafter: DrafterDescription | None) -> LoadedModel | None:
        """Loads this rank's shares; rank 0 says what the model is. `drafter` is that of a draft actor."""
        self._member, loaded = run_in_own_thread(lambda: self._load(num_ranks_on_host, drafter)).result()
        self._steps = StepThread(self._member.speculative_step)
        return loaded

    @ray.method(concurrency_group=STEP_GROUP)
    def speculative_step(self, plan: StepPlan) -> StepResult | None:
        """This rank's part of a step; rank 0's result. The next plan may be brought while a step runs."""
        assert self._steps is not None, "a step before `load`"
        return self._steps.carry_out(plan)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def stats(self) -> dict[str, float]:
        """Rank 0's, beside a step that may be running."""
        assert isinstance(self._member, Worker)
        return self._member.stats()

    @ray.method(concurrency_group=LIFETIME_GROUP)
    def outlive(self) -> None:
        """Never returns: who waits for it learns of the actor's end."""
        threading.Event().wait()

    def _load(
        self, num_ranks_on_host: int, drafter: DrafterDescription | None
    ) -> tuple[Worker | Follower, LoadedModel | None]:
        if self._rank > 0:
            return load_follower(self._config, num_ranks_on_host), None
        remote = received_drafts(self._config, drafter) if drafter is not None else None
        return load_worker(self._config, True, num_ranks_on_host, remote)

    def _connect(self, limit: timedelta) -> None:
        is_cuda = self._device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo", store=self._store, rank=self._rank, world_size=self._size, timeout=limit
        )
        world = dist.group.WORLD
        control = dist.new_group(backend="gloo", timeout=limit) if is_cuda else world
        group = TensorParallelGroup(self._rank, self._size, world, control, self._config.expert_parallel)
        set_tensor_parallel_group(group)
        self._prove(group)
        # From here on who hangs is found by the engine's watchdog, and who dies by its closed connections.
        for process_group in {world, control}:
            _set_pg_timeout(LOADING_LIMIT, process_group)

    def _prove(self, group: TensorParallelGroup) -> None:
        expected = self._size * (self._size + 1) // 2
        for process_group, device in ((group.process_group, self._device), (group.control_group, torch.device("cpu"))):
            ranks = torch.tensor([self._rank + 1], dtype=torch.int64, device=device)
            dist.all_reduce(ranks, group=process_group)
            if int(ranks) != expected:
                raise RuntimeError(
                    f"the self-test of {self._size} ranks failed: rank {self._rank} on {socket.gethostname()} got "
                    f"{int(ranks)} as the sum of 1 to {self._size}, not {expected}"
                )
