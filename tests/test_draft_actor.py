"""A running Serve application whose drafts are made in an actor: texts, faults, and what is left behind."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.config import AppConfig
from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.main import _target_options
from app.serve.target_replica import TargetReplica

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster]

PROMPTS = [list(range(3, 40)), [7, 7, 9, 7, 7, 9, 7, 7], [250, 31, 4], [5, 6] * 15]
MAX_TOKENS = 24
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=6, max_tokens=MAX_TOKENS, ignore_eos=True),
]
SIZES = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 512,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_threads": 1,
}


class Cluster:
    """Ray of this machine alone, with one application at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "draft-actor"

    def deploy(self, config: AppConfig) -> DeploymentHandle:
        application = serve.deployment(**_target_options(config))(TargetReplica).bind(config)
        return serve.run(application, name=self.name, route_prefix=None)

    def delete(self) -> list[int]:
        """Ends the application; processes of its own that are left."""
        serve.delete(self.name)
        deadline = time.monotonic() + 20
        while (left := self.pids("ray::DraftActor") + self.pids("ray::RankActor")) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    async def drafter_other_than(self, pid: int) -> int:
        """The one draft actor, once `pid` is gone: Ray ends a process that hangs by force, after 5 s."""
        async with asyncio.timeout(60):
            while (pids := self.pids("ray::DraftActor")) == [] or pid in pids:
                await asyncio.sleep(0.1)
        assert len(pids) == 1
        return pids[0]

    def pids(self, title: str) -> list[int]:
        """Processes of this Ray that are called so."""
        return [pid for pid, text in _processes() if text.startswith(title) and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            return str(self.folder) in Path(f"/proc/{parent}/cmdline").read_text()
        except OSError:
            return False


def _processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_text()
            except OSError:
                continue  # it has ended since


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))  # short: Ray makes sockets below it
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
    )
    serve.start(proxy_location="Disabled")
    yield Cluster(folder)
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def run_inline(config: AppConfig) -> tuple[list[list[int]], dict[str, Any]]:
    """Texts and counts of the same drafter beside the target, the prompts asked twice."""
    fields = config.speculative_config.model_dump(exclude={"placement", "num_microbatches", "draft_timeout_s"})
    if fields["num_speculative_tokens"] != "auto":
        del fields["max_num_speculative_tokens"]
    engine = LLMEngine(model=config.model, speculative_config=fields, progress=False, **SIZES)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], engine.stats()


def speculating(tiny_checkpoint, **fields: Any) -> dict[str, Any]:
    if fields["method"] == "draft_model":
        fields["model"] = str(tiny_checkpoint("llama", num_hidden_layers=1))
    return {"num_speculative_tokens": 3, "placement": "actor", "num_microbatches": 2, **fields}


def config_of(tiny_checkpoint, speculative: dict[str, Any], **fields: Any) -> AppConfig:
    return AppConfig.model_validate(
        {
            "model": str(tiny_checkpoint("llama")),
            **SIZES,
            "speculative_config": speculating(tiny_checkpoint, **speculative),
            "deployment_config": {"num_replicas": 1},
            **fields,
        }
    )


async def say(handle: DeploymentHandle, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
    stream = handle.options(stream=True).generate.remote(GenerationRequest(name, prompt, params))
    return [token_id async for deltas in stream for delta in deltas for token_id in delta.token_ids]


async def say_all(handle: DeploymentHandle, name: str) -> list[list[int]]:
    each = zip(PROMPTS, PARAMS, strict=True)
    return await asyncio.gather(*(say(handle, f"{name}-{i}", *one) for i, one in enumerate(each)))


@pytest.mark.parametrize(
    ("speculative", "fields"),
    [
        ({"method": "draft_model"}, {}),
        ({"method": "suffix", "memory_bytes": 2**20, "num_speculative_tokens": "auto"}, {}),
        ({"method": "ngram", "min_n": 1}, {"tensor_parallel_size": 2}),
    ],
)
async def test_texts_are_those_of_inline_drafts(speculative, fields, cluster, tiny_checkpoint):
    config = config_of(tiny_checkpoint, speculative, **fields)
    expected, inline = run_inline(config)
    handle = cluster.deploy(config)
    assert len(cluster.pids("ray::DraftActor")) == 1
    for turn in range(2):
        assert await say_all(handle, f"turn-{turn}") == expected
    stats = await handle.stats.remote()
    assert stats["num_drafter_faults"] == stats["num_drafter_restarts"] == 0
    assert stats["num_drafted"] > 0
    if config.speculative_config.num_speculative_tokens != "auto":
        assert stats["num_accepted"] == inline["num_accepted"]
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert cluster.delete() == []


async def test_a_draft_actor_that_dies_or_hangs_is_replaced_in_mid_stream(cluster, tiny_checkpoint):
    """A perfect drafter: acceptance is back only if it begins with all that the streams have said by then."""
    model = str(tiny_checkpoint("llama"))
    config = config_of(tiny_checkpoint, {"method": "draft_model", "draft_timeout_s": 1.0})
    config.speculative_config.model = model
    params = SamplingParams(temperature=0.0, max_tokens=470, ignore_eos=True)
    plain = LLMEngine(model=model, progress=False, **SIZES)
    expected = [o.outputs[0].token_ids for o in plain.generate(PROMPTS[:2], params, use_tqdm=False)]
    handle = cluster.deploy(config)
    pid = await cluster.drafter_other_than(0)
    for num_faults, signal_number in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
        streams = [asyncio.create_task(say(handle, f"{num_faults}-{i}", PROMPTS[i], params)) for i in range(2)]
        while (await handle.stats.remote())["num_running"] < 2:
            await asyncio.sleep(0.01)
        os.kill(pid, signal_number)
        assert await asyncio.gather(*streams) == expected
        stats = await handle.stats.remote()
        assert stats["num_drafter_faults"] >= num_faults
        assert stats["num_drafter_restarts"] == num_faults
        pid = await cluster.drafter_other_than(pid)
        while (before := await handle.stats.remote())["num_drafted"] == stats["num_drafted"]:
            assert await say(handle, f"probe-{time.monotonic()}", PROMPTS[0], PARAMS[0]) == expected[0][:MAX_TOKENS]
        assert await say(handle, f"back-{num_faults}", PROMPTS[0], PARAMS[0]) == expected[0][:MAX_TOKENS]
        after = await handle.stats.remote()
        assert after["num_accepted"] - before["num_accepted"] == after["num_drafted"] - before["num_drafted"] > 0
    assert cluster.delete() == []
