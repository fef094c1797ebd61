"""Two Ray nodes in network namespaces of their own, and a gang with a rank on each: what one machine can show of two.

    python -m tests.netns_two_nodes

Addresses, ports, the rendezvous and every collective cross a virtual cable; /dev/shm and Ray's files are each node's
own. The gang's text must be that of one rank. Linux, root and iproute2 are needed; all that is made is removed again.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
PORT, GCS_PORT = 8000, 6379
START_LIMIT_S, STOP_LIMIT_S = 180.0, 10.0
ARGS = {
    "model": "tests/assets/tiny-deepseek-v3",
    "dtype": "float32",  # the sums of two ranks round differently; in fp32 no two logits of these texts are so close
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_threads": 1,  # each rank has its host to itself, as it sees it; together they would take the cores twice
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    "boot_timeout_s": 60,
}
PROMPTS = ("class Parser:\n", "def add(first, second):\n", "import json\n")
# Run in a namespace: prints the answer to a body at a URL.
ASK = (
    "import sys, urllib.request as web; "
    "request = web.Request(sys.argv[1], sys.argv[2].encode() or None, {'Content-Type': 'application/json'}); "
    "print(web.urlopen(request, timeout=60).read().decode())"
)


class UnableError(Exception):
    """This machine or this user cannot do it; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the cable."""

    name: str
    address: str
    folder: Path
    """Of Ray's files."""

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *arguments]

    def start(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        """In the background, with /dev/shm of its own: no mount that it makes is seen outside."""
        inner = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", *arguments]
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                self.command(*inner), cwd=REPOSITORY, env=environment(), stdout=output, stderr=subprocess.STDOUT
            )

    def ask(self, url: str, body: dict[str, Any] | None = None) -> Any:
        """Raises CalledProcessError where there is no answer, or an error's."""
        content = json.dumps(body) if body is not None else ""
        command = self.command(sys.executable, "-c", ASK, url, content)
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout or "null")

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], check=False, capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def sent_bytes(self) -> int:
        (link,) = json.loads(ip("-n", self.name, "-s", "-json", "link", "show", "dev", "cable"))
        number: int = link["stats64"]["tx"]["bytes"]
        return number


def ip(*arguments: str) -> str:
    """Raises UnableError with the words of `ip` where it fails."""
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise UnableError(f"`ip {' '.join(arguments)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def environment() -> dict[str, str]:
    """Without proxies and addresses of this machine, which do not hold in a namespace."""
    dropped = {"RAY_ADDRESS", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces and a cable between them; their processes end with them."""
    # Short: Ray makes sockets below it, whose paths are limited to 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))
    head, worker = hosts = tuple(
        Host(f"forerun-{role}-{os.getpid()}", f"198.18.0.{number}", folder / role)
        for number, role in enumerate(("head", "worker"), start=1)
    )
    try:
        for host in hosts:
            host.folder.mkdir()
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", head.name, "type", "veth", "peer", "name", "cable", "netns", worker.name)
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
            ip("-n", host.name, "link", "set", "cable", "up")
        yield head, worker
    finally:
        for host in hosts:
            remove(host)
        shutil.rmtree(folder, ignore_errors=True)


def remove(host: Host) -> None:
    """Whatever runs in the namespace was started for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in host.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + STOP_LIMIT_S
        while host.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
    subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


def start_ray(head: Host, worker: Host) -> None:
    """A node a host. Two CPUs each, so that a replica of one rank leaves room for a rank on either."""
    shared = ["--block", "--num-cpus=2", "--object-store-memory=80000000"]
    first = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
    second = [f"--address={head.address}:{GCS_PORT}"]
    for host, place in ((head, first), (worker, second)):
        own = [f"--node-ip-address={host.address}", f"--temp-dir={host.folder}"]
        node = host.start("ray.log", installed("ray"), "start", *place, *own, *shared)
        wait_for(partial(is_up, host), node, host.folder / "ray.log")


def is_up(host: Host) -> bool:
    return "Ray runtime started" in (host.folder / "ray.log").read_text(errors="replace")


def start_serving(head: Host, client: Host) -> None:
    """`serve run` on the head: the model in one rank at /one, and in two, which no node may hold both, at /two."""
    spread = {"num_replicas": 1, "placement_group_strategy": "STRICT_SPREAD"}
    applications = [
        {"name": name, "route_prefix": f"/{name}", "import_path": "app.main:build", "args": ARGS | more}
        for name, more in (
            ("one", {"deployment_config": {"num_replicas": 1}}),
            ("two", {"tensor_parallel_size": 2, "deployment_config": spread}),
        )
    ]
    path = head.folder / "serve.yaml"
    path.write_text(yaml.safe_dump({"http_options": {"host": "0.0.0.0", "port": PORT}, "applications": applications}))
    process = head.start("serve.log", installed("serve"), "run", f"--address={head.address}:{GCS_PORT}", str(path))
    for name in ("one", "two"):
        wait_for(partial(is_healthy, client, f"{url(head)}/{name}/health"), process, head.folder / "serve.log")


def is_healthy(client: Host, address: str) -> bool:
    try:
        client.ask(address)
    except subprocess.CalledProcessError:
        return False
    return True


def installed(command: str) -> str:
    return str(Path(sys.executable).with_name(command))


def url(host: Host) -> str:
    return f"http://{host.address}:{PORT}"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError with the log where the process ends, or time runs out, first."""
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no start within {START_LIMIT_S:.0f} s:\n{log.read_text(errors='replace')}")
        time.sleep(1)


def addresses_of_ranks(hosts: Sequence[Host]) -> list[str]:
    """As the replica, which may be on either host, has logged them."""
    logs = [path for host in hosts for path in host.folder.glob("session_2*/logs/serve/replica_two_*.log")]
    found = re.search(r"Ranks 0 to 1 have met .*: \[(.*)\]", "".join(path.read_text() for path in logs))
    assert found is not None, "the replica's log does not say that the ranks have met"
    return re.findall(r"[0-9.]+", found[1])


def check(head: Host, worker: Host) -> None:
    """Asks from the worker's host. Raises AssertionError where the gang is not what one rank is."""
    start = time.monotonic()
    start_ray(head, worker)
    print(f"Two nodes, {head.address} and {worker.address}: {time.monotonic() - start:.0f} s")
    start_serving(head, worker)
    addresses = addresses_of_ranks((head, worker))
    print(f"Both applications are ready: {time.monotonic() - start:.0f} s. Ranks of the gang: {', '.join(addresses)}")
    assert sorted(addresses) == [head.address, worker.address], "a rank on each host was asked for"

    for prompt in PROMPTS:
        body = {"model": "tiny-deepseek-v3", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        sent, begin = worker.sent_bytes() + head.sent_bytes(), time.monotonic()
        two = worker.ask(f"{url(head)}/two/v1/completions", body | {"include_speculation_metrics": True})
        elapsed, sent = time.monotonic() - begin, worker.sent_bytes() + head.sent_bytes() - sent
        begin = time.monotonic()
        one = worker.ask(f"{url(head)}/one/v1/completions", body)
        alone = time.monotonic() - begin
        texts = [answer["choices"][0]["text"] for answer in (one, two)]
        assert texts[0] == texts[1] != "", f"one rank says {texts[0]!r}, two say {texts[1]!r}"
        metrics = two["speculation_metrics"]
        assert metrics["accepted"] > 0, "drafts were made, and none was kept"
        print(
            f"{prompt!r}: the same 64 tokens, {metrics['steps']} steps, {metrics['accepted']} drafts accepted, "
            f"{elapsed:.2f} s (one rank {alone:.2f} s), {sent / 1e6:.1f} MB over the cable"
        )


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        if shutil.which("ip") is None:
            raise UnableError("`ip` is missing: apt-get install iproute2")
        if os.geteuid() != 0:
            raise UnableError("only root may make network namespaces")
        with two_hosts() as (head, worker):
            check(head, worker)
    except UnableError as reason:
        print(f"This machine cannot be two: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
