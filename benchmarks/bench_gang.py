"""What it costs a step that its ranks are actors: wall time less what rank 0 was busy, two ranks, in turn.

    python benchmarks/bench_gang.py [--model FOLDER] [--steps 200] [--repeats 5]

On one node, then across two raylets of this machine; each with one plan on its way and with two. With two the next
plan waits in the actors' queues while a step runs, and what is left over is the time between two calls of an actor.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import AppConfig
from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.serve.launch import schedule_as_batch, tell_ray
from benchmarks.machine import this_machine
from benchmarks.report import format_table, number, print_header, print_json

NUM_SEQUENCES = 8
SHIPPED = Path(__file__).resolve().parent.parent / "tests" / "assets" / "tiny-deepseek-v3"


class Host:
    """Stands where the replica would: in the first bundle, with the engine."""

    def __init__(self, config: AppConfig) -> None:
        from app.serve.gang import boot  # in the actor, whose process alone has a placement group

        self._gang, loaded = boot(config)
        self._engine = LLMEngine.from_executor(config, self._gang, loaded)
        self._num_requests = 0

    def overhead_ms(self, num_steps: int, max_in_flight: int) -> tuple[float, float]:
        """Medians over steps of decoding: wall time, and wall time less rank 0's."""
        self._gang.max_in_flight = max_in_flight  # type: ignore[misc]
        for _ in range(NUM_SEQUENCES):
            self._num_requests += 1
            params = SamplingParams(temperature=0.0, max_tokens=num_steps + 20, ignore_eos=True)
            self._engine.add_request(GenerationRequest(f"r{self._num_requests}", [5, 6, 7], params))
        for _ in range(10):
            self._engine.step()
        walls, overheads = [], []
        totals = self._engine.totals
        for _ in range(num_steps):
            busy, start = totals.propose_s + totals.forward_s + totals.verify_s + totals.commit_s, time.perf_counter()
            self._engine.step()
            walls.append(time.perf_counter() - start)
            busy = totals.propose_s + totals.forward_s + totals.verify_s + totals.commit_s - busy
            overheads.append(walls[-1] - busy)
        while self._engine.has_work:
            self._engine.step()
        return 1e3 * statistics.median(walls), 1e3 * statistics.median(overheads)

    def shutdown(self) -> None:
        self._engine.shutdown()


def measure(config: AppConfig, strategy: str, num_steps: int, num_repeats: int) -> dict[str, float]:
    group = placement_group([{"CPU": 1}] * 2, strategy=strategy)
    ray.get(group.ready())
    where = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    host = ray.remote(Host).options(num_cpus=0, scheduling_strategy=where).remote(config)
    rounds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(num_repeats):
        for max_in_flight, measured in rounds.items():
            measured.append(ray.get(host.overhead_ms.remote(num_steps, max_in_flight)))
    ray.get(host.shutdown.remote())
    ray.kill(host)
    ray.util.remove_placement_group(group)
    return {
        f"{name}_{max_in_flight}_in_flight_ms": statistics.median(each[i] for each in measured)
        for max_in_flight, measured in rounds.items()
        for i, name in enumerate(("step", "overhead"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    tell_ray()
    schedule_as_batch()
    config = AppConfig.model_validate(
        {"model": arguments.model, "tensor_parallel_size": 2, "max_num_seqs": NUM_SEQUENCES, "max_model_len": 512}
    )
    results = {}
    with tempfile.TemporaryDirectory(prefix="forerun-", dir="/tmp") as folder:  # short: Ray makes sockets below it
        os.environ["RAY_TMPDIR"] = folder  # Ray writes the address of its newest cluster there
        ray_folder = Path(folder) / "ray"
        ray_folder.mkdir()
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "temp_dir": str(ray_folder)},
        )
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        for strategy, where in (("STRICT_PACK", "one node"), ("STRICT_SPREAD", "two raylets")):
            results[where] = measure(config, strategy, arguments.steps, arguments.repeats)
        ray.shutdown()
        cluster.shutdown()
    workload = f"{NUM_SEQUENCES} sequences, {arguments.steps} steps, medians of {arguments.repeats} rounds"
    print_header(this_machine(), arguments.model, workload=workload)
    rows = [
        [where, f"{num}", *(number(figures[f"{name}_{num}_in_flight_ms"], 2) for name in ("step", "overhead"))]
        for where, figures in results.items()
        for num in (1, 2)
    ]
    print(format_table(["two ranks on", "plans on their way", "ms a step", "of it beside rank 0's work"], rows))
    print_json(results, None)


if __name__ == "__main__":
    main()
