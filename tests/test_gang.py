"""A gang of two ranks on nodes of their own, and what becomes of requests when parts of it fail.

One cluster and one application serve all tests of this file, in their order: what a test leaves behind, the next one
would meet. After each nothing is left over, and the next request is answered.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from app.config import AppConfig
from app.engine.sampling_params import SamplingParams
from app.engine_config import EngineConfig
from app.llm_engine import LLMEngine
from app.main import build
from tests.helpers.gang_cluster import INGRESS, RANK, REPLICA, GangCluster, is_alive, stream, wait_for
from tests.helpers.recovery import RecordProperty, timed

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster]

PROMPT = [5, 6, 7, 8]
LONG = 400  # tokens: a stream that is still running when something happens
STEP_TIMEOUT_S = 4.0
SIZES = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "block_size": 8, "kv_cache_memory": 4 << 20}


@pytest.fixture(scope="module")
def args(tiny_checkpoint) -> dict[str, Any]:
    return {
        "model": str(tiny_checkpoint("llama")),
        "tensor_parallel_size": 2,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "min_n": 1},
        "step_timeout_s": STEP_TIMEOUT_S,
        "retry_limit_s": 120.0,
        "ingress_config": {"resources": {"head": 0.01}},  # beside the proxy: no other node's loss is theirs
        "deployment_config": {
            "num_replicas": 1,
            "placement_group_strategy": "STRICT_SPREAD",
            "health_check_period_s": 1.0,
            "max_queued_requests": 220,
            "graceful_shutdown_timeout_s": 30.0,
        },
        **SIZES,
    }


@pytest.fixture(scope="module")
def cluster(args) -> Iterator[GangCluster]:
    cluster = GangCluster(num_workers=2)
    try:
        cluster.deploy("app", args)
        yield cluster
        last = pids(cluster)
        assert len(last) == 2
    finally:
        cluster.shutdown()
    wait_for(lambda: not any(is_alive(pid) for pid in last), what="the end of all ranks")


@pytest.fixture(autouse=True)
def _whole_afterwards(cluster: GangCluster) -> Iterator[None]:
    """Whatever happened: one gang, one placement group, all blocks free, and an answer."""
    yield
    wait_for(lambda: cluster.ask().status_code == 200, what="an answer")
    wait_for(lambda: len(cluster.actors(RANK)) == 2, what="two ranks and no more")
    wait_for(lambda: cluster.num_placement_groups() == 1, what="one placement group and no more")
    wait_for(lambda: is_idle(cluster), what="idleness with all blocks free")


def is_idle(cluster: GangCluster, app: str = "app") -> bool:
    [stats] = cluster.stats(app)
    return (
        stats["num_open_requests"] == stats["num_running"] == stats["num_waiting"] == 0
        and stats["num_free_blocks"] == stats["num_blocks"]
    )


def is_generating(cluster: GangCluster, num: int = 1) -> bool:
    return cluster.stats()[0]["num_running"] >= num


def ranks(cluster: GangCluster) -> list[dict[str, Any]]:
    """Rank 0, on the node of the replica, first."""
    [replica] = cluster.actors(REPLICA)
    return sorted(cluster.actors(RANK), key=lambda each: each["Address"]["NodeID"] != replica["Address"]["NodeID"])


def test_two_nodes_say_what_one_process_says(cluster, args):
    nodes = [rank["Address"]["NodeID"] for rank in ranks(cluster)]
    assert len(set(nodes)) == 2
    fields = {name: args[name] for name in (*SIZES, "model", "speculative_config")}
    engine = LLMEngine(EngineConfig(**fields), progress=False)
    for params in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 4}):
        asked = SamplingParams(max_tokens=40, ignore_eos=True, **params)
        [expected] = engine.generate([PROMPT], asked, use_tqdm=False)
        answer = cluster.ask(prompt=PROMPT, max_tokens=40, return_token_ids=True, **params).json()
        assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids


def pids(cluster: GangCluster) -> set[int]:
    return {rank["Pid"] for rank in cluster.actors(RANK)}


def has_new_gang(cluster: GangCluster, before: set[int]) -> bool:
    return len(now := pids(cluster)) == 2 and not now & before and cluster.ask().status_code == 200


async def while_streaming(cluster: GangCluster, fault: Any, num_waiting: int = 6) -> tuple[Any, list[Any]]:
    """The stream that the fault strikes, and answers that are asked for before it; returns once there is a new gang."""
    before = pids(cluster)
    streaming = asyncio.create_task(stream(cluster, max_tokens=LONG))
    await asyncio.to_thread(wait_for, lambda: is_generating(cluster))
    asked = [
        asyncio.create_task(asyncio.to_thread(cluster.ask, timeout_s=90, max_tokens=200)) for _ in range(num_waiting)
    ]
    await asyncio.to_thread(wait_for, lambda: is_generating(cluster, 2))
    await asyncio.to_thread(fault)
    await asyncio.to_thread(wait_for, lambda: has_new_gang(cluster, before), what="a new gang that answers")
    return await streaming, await asyncio.gather(*asked)


def check_fault(cluster: GangCluster, record_property: RecordProperty, name: str, fault: Any) -> None:
    """The stream that had begun ends with an error that says so; nothing else is lost."""
    with contextlib.ExitStack() as until_all_have_answers:

        def strike() -> None:
            until_all_have_answers.enter_context(timed(record_property, name))
            fault()

        (status, pieces, error), answers = asyncio.run(while_streaming(cluster, strike))
    assert status == 200
    assert "".join(pieces)
    assert error is not None
    assert [answer.status_code for answer in answers] == [200] * len(answers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_replaced_with_its_gang(cluster, record_property, rank):
    before = ranks(cluster)
    fault = f"rank {rank} dies"
    check_fault(cluster, record_property, fault, lambda: os.kill(before[rank]["Pid"], signal.SIGKILL))
    assert not any(is_alive(each["Pid"]) for each in before)
    assert "The step loop failed" in cluster.log("TargetReplica")


@pytest.mark.parametrize(
    ("rank", "number", "fault"),
    [(1, signal.SIGKILL, "rank 1 dies while nothing runs"), (0, signal.SIGSTOP, "rank 0 hangs while nothing runs")],
)
def test_a_rank_that_is_lost_while_nothing_runs_is_noticed(cluster, record_property, rank, number, fault):
    before = pids(cluster)
    with timed(record_property, fault):
        os.kill(ranks(cluster)[rank]["Pid"], number)
        wait_for(lambda: has_new_gang(cluster, before), what="a new gang that answers")
    assert not any(is_alive(pid) for pid in before)


def test_a_rank_that_hangs_is_given_up(cluster, record_property):
    before = ranks(cluster)
    check_fault(cluster, record_property, "rank 1 hangs", lambda: os.kill(before[1]["Pid"], signal.SIGSTOP))
    assert not any(is_alive(each["Pid"]) for each in before)
    assert "The step loop hangs: work is pending, and no step has finished" in cluster.log("TargetReplica")


def test_a_node_that_is_lost_is_done_without(cluster, record_property):
    cluster.add_worker()
    node_id = ranks(cluster)[1]["Address"]["NodeID"]
    check_fault(cluster, record_property, "node lost, another there", lambda: cluster.remove_worker(node_id))


def test_without_capacity_requests_wait_for_a_node(cluster, record_property):
    """And the ingress says what is missing, for as long as it is."""
    lost = ranks(cluster)[1]
    line = "2 bundles of 1 CPU, each on a node of its own are needed, and 2 nodes with"

    async def lose_and_add() -> list[Any]:
        await asyncio.to_thread(cluster.remove_worker, lost["Address"]["NodeID"])
        await asyncio.to_thread(wait_for, lambda: not is_alive(lost["Pid"]))
        asked = [asyncio.create_task(asyncio.to_thread(cluster.ask, timeout_s=150)) for _ in range(4)]
        await asyncio.to_thread(wait_for, lambda: line in cluster.log("Ingress"), what="a line on what is missing")
        assert not any(task.done() for task in asked), [task.result().text for task in asked if task.done()]
        cluster.add_worker()  # in the main thread: it sets signal handlers
        with timed(record_property, "node lost, from the time that another comes"):
            return await asyncio.gather(*asked)

    answers = asyncio.run(lose_and_add())
    assert [answer.status_code for answer in answers] == [200] * 4


def test_an_ingress_that_dies_is_replaced(cluster, record_property):
    [ingress] = cluster.actors(INGRESS)
    os.kill(ingress["Pid"], signal.SIGKILL)
    with timed(record_property, "ingress dies"):
        wait_for(lambda: cluster.ask().status_code == 200)
    assert cluster.actors(INGRESS)[0]["Pid"] != ingress["Pid"]


def test_clients_that_leave_take_nothing_with_them(cluster):
    """200 of them; every second one hangs up after a while."""

    async def one(i: int) -> int | None:
        task = asyncio.create_task(stream(cluster, max_tokens=24, prompt=[3 + i % 200, 9, 4]))
        if i % 2:
            await asyncio.sleep(0.02 * (i % 40))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return (await task)[0]

    async def all_of_them() -> list[int | None]:
        return await asyncio.gather(*(one(i) for i in range(200)))

    statuses = asyncio.run(all_of_them())
    assert [status for status in statuses if status is not None] == [200] * 100


def test_a_full_queue_refuses(cluster):
    async def all_of_them() -> list[int]:
        tasks = [asyncio.create_task(stream(cluster, max_tokens=2, n=8)) for _ in range(40)]
        return [status for status, *_ in await asyncio.gather(*tasks)]

    statuses = asyncio.run(all_of_them())
    assert set(statuses) == {200, 429}


def test_a_new_configuration_loses_no_request(cluster, args, record_property):
    """A redeployment under load: old and new gang never hold the nodes together, and requests wait in between."""

    async def under_load() -> list[int]:
        answered: list[int] = []
        done = asyncio.Event()

        async def client() -> None:
            while not done.is_set():
                response = await asyncio.to_thread(cluster.ask, timeout_s=120)
                answered.append(response.status_code)

        clients = [asyncio.create_task(client()) for _ in range(4)]
        changed = {**args, "max_num_seqs": 6}
        with timed(record_property, "a new configuration, deployed under load"):
            await asyncio.to_thread(cluster.deploy, "app", changed)
            done.set()
            await asyncio.gather(*clients)
        return answered

    answered = asyncio.run(under_load())
    assert len(answered) > 4
    assert set(answered) == {200}


def test_two_applications_share_the_nodes(cluster, args):
    small = {**args, "tensor_parallel_size": 1, "speculative_config": None}
    small["deployment_config"] = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    cluster.deploy("other", small)
    try:
        mine, other = cluster.ask("app", max_tokens=30).json(), cluster.ask("other", max_tokens=30).json()
        assert mine["choices"][0]["text"] == other["choices"][0]["text"]
    finally:
        ray.serve.delete("other")


def test_ranks_that_no_cluster_holds_are_refused(cluster, args):
    with pytest.raises(ValueError, match="4 bundles of 1 CPU, each on a node of its own are needed"):
        build(AppConfig.model_validate({**args, "tensor_parallel_size": 4}))
