"""Several Ray nodes on this machine with an application of two ranks, and what faults do to them."""

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from app.config import AppConfig
from app.main import build

QUICK_TO_MISS_A_NODE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
}
RANK, REPLICA, INGRESS = "RankActor", "ServeReplica:{app}:TargetReplica", "ServeReplica:{app}:Ingress"


class GangCluster:
    """A head without CPUs and worker nodes of one each, so that `STRICT_SPREAD` ranks are on nodes of their own."""

    def __init__(self, num_workers: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))  # short: Ray makes sockets below it
        self._ray_folder = self._folder / "ray"
        self._ray_folder.mkdir()
        self._tmpdir = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = str(self._folder)  # Ray writes the address of its newest cluster there, too
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "resources": {"head": 1},
                "include_dashboard": False,
                "temp_dir": str(self._ray_folder),
                "_system_config": QUICK_TO_MISS_A_NODE,
            },
        )
        # Before there are others: this process speaks through the head, which no test takes away.
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.workers = [self.cluster.add_node(num_cpus=1) for _ in range(num_workers)]
        self.port = _free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})
        self.configs: dict[str, AppConfig] = {}

    def deploy(self, name: str, args: dict[str, Any]) -> None:
        """Runs an application under the route of its name, or changes the one that runs there; waits until it runs."""
        self.configs[name] = config = AppConfig.model_validate(args)
        serve.run(build(config), name=name, route_prefix=f"/{name}")

    def add_worker(self) -> None:
        self.workers.append(self.cluster.add_node(num_cpus=1))

    def remove_worker(self, node_id: str) -> None:
        """Takes a node away as a failure would: without a farewell."""
        [node] = [node for node in self.workers if node.node_id == node_id]
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def actors(self, kind: str, app: str = "app") -> list[dict[str, Any]]:
        """Those alive of a class."""
        wanted = kind.format(app=app)
        return [a for a in actors().values() if a["ActorClassName"] == wanted and a["State"] == "ALIVE"]

    def url(self, app: str = "app") -> str:
        return f"http://127.0.0.1:{self.port}/{app}"

    def body(self, app: str = "app", **fields: Any) -> dict[str, Any]:
        model = self.configs[app].model_name
        return {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}

    def ask(self, app: str = "app", timeout_s: float = 60.0, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url(app)}/v1/completions", json=self.body(app, **fields), timeout=timeout_s)

    def stats(self, app: str = "app") -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = httpx.get(f"{self.url(app)}/stats", timeout=20).json()["replicas"]
        return replicas

    def log(self, deployment: str, app: str = "app") -> str:
        """What the replicas of a deployment have said, those that are gone included."""
        files = self._ray_folder.glob(f"session_2*/logs/serve/replica_{app}_{deployment}_*.log")
        return "\n".join(file.read_text(errors="replace") for file in files)

    def num_placement_groups(self) -> int:
        return sum(group["state"] in ("CREATED", "PENDING") for group in placement_group_table().values())

    def shutdown(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        if self._tmpdir is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._tmpdir
        shutil.rmtree(self._folder, ignore_errors=True)


async def stream(cluster: GangCluster, app: str = "app", **fields: Any) -> tuple[int, list[str], str | None]:
    """A streamed answer: its status, its pieces of text, and the message of the error that ended it."""
    pieces: list[str] = []
    body = cluster.body(app, stream=True, **fields)
    async with (
        httpx.AsyncClient(timeout=180) as client,
        client.stream("POST", f"{cluster.url(app)}/v1/completions", json=body) as response,
    ):
        if response.status_code != 200:
            return response.status_code, pieces, json.loads(await response.aread())["error"]["message"]
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return 200, pieces, event["error"]["message"]
            pieces += [choice["text"] for choice in event["choices"]]
    return 200, pieces, None


def wait_for(condition: Callable[[], Any], limit_s: float = 60.0, what: str = "") -> Any:
    """The condition's first true value; what it raises counts as not true."""
    end, error = time.monotonic() + limit_s, None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except Exception as raised:
            error = raised
        time.sleep(0.1)
    raise AssertionError(f"{what or condition} did not come about within {limit_s:g} s; last error: {error!r}")


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
