"""An engine over ranks that are processes of this machine: what the gang of actors does, without Ray."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from app.engine.plan import StepPlan, StepResult
from app.engine_config import EngineConfig
from app.executor import PendingStep
from app.llm_engine import LLMEngine
from app.worker import Worker
from app.worker_loader import load_follower, load_worker
from models.parallel import ALONE, TensorParallelGroup, set_tensor_parallel_group


class RankExecutor:
    """Rank 0 in this process; plans reach the others as objects of the process group."""

    max_in_flight = 1
    num_microbatches = None

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def submit(self, plan: StepPlan) -> PendingStep:
        return partial(self._step, plan)

    def stats(self) -> dict[str, float]:
        return self.worker.stats()

    def check_health(self) -> None:
        """A lost rank ends the test."""

    def shutdown(self) -> None:
        dist.broadcast_object_list([None])

    def _step(self, plan: StepPlan) -> StepResult:
        dist.broadcast_object_list([plan])
        return self.worker.speculative_step(plan)


def run_ranks(num_ranks: int, work: Path, configs: list[dict[str, Any]], use: Callable[[LLMEngine], Any]) -> list[Any]:
    """What `use`, a function of a module, returns for an engine of each configuration; each of `num_ranks` ranks."""
    mp.spawn(_run_rank, (num_ranks, work, configs, use), nprocs=num_ranks)
    return torch.load(work / "results.pt", weights_only=False)


def _run_rank(
    rank: int, num_ranks: int, work: Path, configs: list[dict[str, Any]], use: Callable[[LLMEngine], Any]
) -> None:
    torch.set_num_threads(1)
    results = []
    with process_group(rank, num_ranks, work) as group:
        for fields in configs:
            config = EngineConfig(tensor_parallel_size=num_ranks, **fields)
            set_tensor_parallel_group(replace(group, expert_parallel=config.expert_parallel))
            if rank == 0:
                worker, loaded = load_worker(config, progress=False, num_ranks_on_host=num_ranks)
                engine = LLMEngine.from_executor(config, RankExecutor(worker), loaded)
                results.append(use(engine))
                engine.shutdown()
            else:
                follower = load_follower(config, num_ranks_on_host=num_ranks)
                while (plan := _next_plan()) is not None:
                    follower.speculative_step(plan)
        if rank == 0:
            torch.save(results, work / "results.pt")


@contextmanager
def process_group(rank: int, num_ranks: int, work: Path) -> Iterator[TensorParallelGroup]:
    """This process as one of `num_ranks` that share the folder `work`; none leaves while another still listens."""
    store = dist.FileStore(str(work / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        yield TensorParallelGroup(rank, num_ranks, dist.group.WORLD, dist.group.WORLD)
        store.set(f"done {rank}", "")
        store.wait([f"done {other}" for other in range(num_ranks)])
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """Ends the group's threads: one that still runs when the interpreter ends may abort the process."""
    set_tensor_parallel_group(ALONE)  # which would keep the group, and its threads, beyond the interpreter's end
    dist.destroy_process_group()


def _next_plan() -> StepPlan | None:
    plans: list[StepPlan | None] = [None]
    dist.broadcast_object_list(plans)
    return plans[0]
