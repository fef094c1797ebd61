"""A running Serve application: its metrics as Prometheus sees them, and its replicas as the load comes and goes.

The engine is a stub, so that its numbers are known; replica, controller, policy and endpoint are Ray's and ours.
"""

import asyncio
import itertools
import os
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.config import AppConfig
from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine.sampling_params import SamplingParams
from app.main import _target_options
from app.serve.messages import ModelDescription, Refused
from app.serve.metric import Metric
from app.serve.metric_table import METRICS
from app.serve.metrics import difference
from app.serve.target_replica import TargetReplica
from tests.helpers.stub_engine import IDLE_STATS, StubEngine

pytestmark = [pytest.mark.timeout(180), pytest.mark.cluster]

NUM_SLOTS = 4
TOKENS_A_PROMPT = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))  # short: Ray makes sockets below it
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
        _system_config={"metrics_report_interval_ms": 500},
    )
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def deploy(make_engine: Callable[[], StubEngine], serve_options: dict[str, Any], **fields: Any) -> DeploymentHandle:
    config = AppConfig.model_validate({"model": "some/model", "max_num_seqs": NUM_SLOTS, **fields})

    async def load(_: AppConfig) -> tuple[StubEngine, ModelDescription]:
        return make_engine(), ModelDescription(Path("nowhere"), max_model_len=64, vocab_size=100)

    options = _target_options(config) | {"ray_actor_options": {"num_cpus": 0}} | serve_options
    application = serve.deployment(**options)(TargetReplica).bind(config, load)
    return serve.run(application, route_prefix=None)


def request(name: str, max_tokens: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens), n)


async def collect(handle: DeploymentHandle, asked: GenerationRequest) -> list[Any]:
    return [item async for item in handle.options(stream=True).generate.remote(asked)]


COUNTS: dict[str, Any] = {
    **{key: 100 + position for position, key in enumerate(IDLE_STATS)},
    "accepted_per_position": [90, 40, 7],
    "drafted_per_position": [120, 80, 33],
    "kv_usage": 0.25,
    "controller_total_s": 9.5,
    "controller_measured_gain": 1.5,
    "controller_emitted_tokens": 600,
    "controller_plain_tokens": 400.0,
    "controller_predicted_tokens": 620.0,
    "controller_num_decisions": 90,
    "controller_num_plain": 30,
}


def scrape() -> dict[tuple[str, str], float]:
    """By name and the metric's own label; of this application's only replica."""
    [node] = ray.nodes()
    with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    labels = {metric.label for metric in METRICS if metric.label} | {"le"}
    values: dict[tuple[str, str], float] = {}
    for line in lines:
        if not line.startswith("ray_forerun_"):
            continue
        name, tags, number = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
        found = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        assert (found["deployment"], found["model_name"]) == ("TargetReplica", "model")
        assert found["replica"]
        values[name, next((found[label] for label in labels if label in found), "")] = float(number)
    return values


def expected(metric: Metric) -> dict[tuple[str, str], float]:
    assert metric.read is not None
    stats = COUNTS | {"num_running": 0}
    values = metric.read(stats, difference(stats, {}))
    return {(metric.exported_name, label): value for label, value in values.items()}


OBSERVED = {
    ("ray_forerun_request_success_total", "length"): 4,
    ("ray_forerun_request_success_total", "abort"): 1,
    ("ray_forerun_requests_refused_total", "invalid"): 1,
    ("ray_forerun_time_to_first_token_seconds_count", ""): 5,
    ("ray_forerun_inter_token_latency_seconds_count", ""): 4 * 4 + 1,
    ("ray_forerun_request_time_per_output_token_seconds_count", ""): 4,
    ("ray_forerun_e2e_request_latency_seconds_count", ""): 4,
    ("ray_forerun_e2e_request_latency_seconds_bucket", "0.3"): 4,
    ("ray_forerun_request_prompt_tokens_count", ""): 4,
    ("ray_forerun_request_prompt_tokens_bucket", "2.0"): 0,
    ("ray_forerun_request_prompt_tokens_bucket", "5.0"): 4,
    ("ray_forerun_request_generation_tokens_bucket", "2.0"): 0,
    ("ray_forerun_request_generation_tokens_bucket", "5.0"): 4,
}


class TwoTokens(StubEngine):
    """As the stub, but for a request named `stuck`, which gets two tokens and no more."""

    async def generate(self, asked: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        num_steps = 0
        async for step in super().generate(asked):
            yield step
            num_steps += 1
            if asked.request_id == "stuck" and num_steps == 2:
                await asyncio.Event().wait()


async def test_every_metric_is_at_rays_endpoint_with_the_right_value(cluster: None) -> None:
    def make_engine() -> StubEngine:
        engine = TwoTokens()
        engine.counts = dict(COUNTS)
        return engine

    handle = deploy(make_engine, {}, deployment_config={"num_replicas": 1})
    for name, n in (("a", 1), ("b", 2), ("c", 1)):
        assert len(await collect(handle, request(name, max_tokens=5, n=n))) == 5
    [refused] = await collect(handle, request("wide", max_tokens=5, n=1000))
    assert isinstance(refused, Refused)
    stuck = handle.options(stream=True).generate.remote(request("stuck", max_tokens=5))
    for _ in range(2):
        await anext(aiter(stuck))
    stuck.cancel()

    wanted = OBSERVED | {key: value for metric in METRICS if metric.read for key, value in expected(metric).items()}
    assert {key[0].removesuffix("_bucket").removesuffix("_count") for key in wanted} == {
        metric.exported_name for metric in METRICS
    }
    deadline = time.monotonic() + 30
    while True:
        values = await asyncio.to_thread(scrape)
        differing = {key: (value, values.get(key)) for key, value in wanted.items() if values.get(key) != value}
        if not differing:
            break
        assert time.monotonic() < deadline, f"expected and found: {differing}"
        await asyncio.sleep(0.25)
    serve.delete("default")


class BusyEngine(StubEngine):
    """A few slots, and a queue before them; long answers go on until `end` exists. A token's text is its process."""

    def __init__(self, end: Path) -> None:
        super().__init__()
        self.end = end

    async def generate(self, asked: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        self.open.add(asked.request_id)
        try:
            for step in itertools.count(1):
                await asyncio.sleep(0.05)
                reason: Any = "stop" if step == asked.sampling_params.max_tokens or self.end.exists() else None
                yield [SequenceDelta(asked.request_id, 0, str(os.getpid()), [step], finish_reason=reason)]
                if reason is not None:
                    return
        finally:
            self.open.discard(asked.request_id)

    async def stats(self) -> dict[str, Any]:
        num_waiting = max(len(self.open) - NUM_SLOTS, 0)
        return IDLE_STATS | {
            "num_running": len(self.open) - num_waiting,
            "num_waiting": num_waiting,
            "num_waiting_tokens": TOKENS_A_PROMPT * num_waiting,
            "kv_usage": (len(self.open) - num_waiting) / NUM_SLOTS / 2,
        }


def num_running_replicas() -> int:
    application = serve.status().applications["default"]
    return application.deployments["TargetReplica"].replica_states.get("RUNNING", 0)


async def until_replicas(num: int) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(num_running_replicas) != num:
            await asyncio.sleep(0.1)


class Stream:
    """An open answer."""

    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._response = handle.options(stream=True).generate.remote(request(name, max_tokens=1_000_000))
        self.items: list[SequenceDelta] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for [item] in self._response:
            self.items.append(item)

    async def process(self) -> str:
        """Of the replica that answers."""
        async with asyncio.timeout(30):
            while not self.items:
                await asyncio.sleep(0.01)
        return self.items[0].text

    async def goes_on(self, num_steps: int) -> None:
        num_items = len(self.items) + num_steps
        while len(self.items) < num_items:
            assert not self._task.done(), "the answer was cut"
            await asyncio.sleep(0.01)

    async def cancel(self) -> None:
        self._response.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def is_whole(self) -> bool:
        await asyncio.wait_for(self._task, 30)
        numbers = [token_id for item in self.items for token_id in item.token_ids]
        return numbers == list(range(1, len(numbers) + 1)) and self.items[-1].finish_reason == "stop"


async def test_replicas_come_with_the_load_and_go_without_cutting_a_stream(cluster: None, tmp_path: Path) -> None:
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_queued_tokens": 2 * TOKENS_A_PROMPT,
        "target_ongoing_requests": 1000.0,  # so that requests alone would never scale
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 0.5,
        "look_back_period_s": 1.0,
    }
    config = AppConfig.model_validate({"model": "m/m", "deployment_config": {"autoscaling_config": autoscaling}})
    options = config.autoscaling_config.serve_options() | {"metrics_interval_s": 0.2}  # Serve's 10 s are long here
    end = tmp_path / "end"
    handle = deploy(lambda: BusyEngine(end), {"autoscaling_config": options})
    assert num_running_replicas() == 1

    streams = [Stream(handle, f"early{i}") for i in range(2)]
    first = {await stream.process() for stream in streams}
    burst = [Stream(handle, f"burst{i}") for i in range(10)]
    await until_replicas(2)
    async with asyncio.timeout(30):
        while await (late := Stream(handle, f"late{time.monotonic()}")).process() in first:
            burst.append(late)
    for stream in burst:
        await stream.cancel()
    await until_replicas(1)
    await asyncio.gather(*(stream.goes_on(num_steps=40) for stream in [*streams, late]))  # for two seconds
    end.touch()
    assert [await stream.is_whole() for stream in [*streams, late]] == [True] * 3
    assert len({stream.items[-1].text for stream in [*streams, late]}) == 2, "each on the replica that it began on"
    serve.delete("default")
