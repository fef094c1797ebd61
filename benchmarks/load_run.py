"""Mixed requests against a running server for a while: nothing may grow, stay behind or change.

    python benchmarks/load_run.py --url http://127.0.0.1:8000 --minutes 10 --pid REPLICA

Clients send short, long, cancelled, seeded and greedy requests and several choices at once, in an order that the seed
decides. Exits with 1 where an answer fails, a seeded or greedy answer differs from its first, blocks are missing at
the end, the replica is another one by then, or its memory in the last quarter is above that of the second by more than
5%. Its process is the one that `ps` calls ray::ServeReplica:...:TargetReplica.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from benchmarks.http_client import first_model
from benchmarks.machine import process_tree_memory, this_machine
from benchmarks.report import print_header, print_json

WORDS = ("river", "stone", "lamp", "engine", "winter", "garden", "letter", "silver", "copper", "morning", "market")
KINDS = ("short", "long", "cancelled", "seeded", "greedy", "choices")
MEMORY_PERIOD_S = 2.0
GROWTH = 1.05  # of memory, from the second quarter to the last


class LoadRun:
    def __init__(self, url: str, num_clients: int, seed: int, pid: int) -> None:
        self.model = first_model(url)
        self._url, self._pid = url, pid
        self._num_clients, self._random = num_clients, random.Random(seed)
        self.num_requests: Counter[str] = Counter()
        self.faults: list[str] = []
        self.memory_mib: list[float] = []
        self._first_answers: dict[tuple[str, str], str] = {}

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with httpx.AsyncClient(timeout=180, trust_env=False) as client:
            watch = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._client(client, end) for _ in range(self._num_clients)))
            if watch.done():
                self.faults.append(f"the replica's process is gone: {watch.exception()!r}")
            watch.cancel()
            await self._check_blocks(client)
        self._check_memory()

    async def _client(self, client: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            kind = self._random.choice(KINDS)
            self.num_requests[kind] += 1
            try:
                await self._request(client, kind)
            except Exception as error:
                self.faults.append(f"{kind}: {error!r}")

    async def _request(self, client: httpx.AsyncClient, kind: str) -> None:
        prompt = " ".join(self._random.choices(WORDS, k=self._random.choice((3, 12, 80))))
        fields: dict[str, Any] = {
            "short": {"max_tokens": 8},
            "long": {"max_tokens": 200},
            "cancelled": {"max_tokens": 200},
            "seeded": {"max_tokens": 24, "temperature": 0.9, "seed": 7},
            "greedy": {"max_tokens": 24, "temperature": 0.0},
            "choices": {"max_tokens": 16, "n": 3},
        }[kind]
        if kind in ("seeded", "greedy"):
            prompt = self._random.choice(WORDS)  # few, so that each comes again
        body = {"model": self.model, "prompt": prompt, "ignore_eos": True, **fields}
        if kind == "cancelled":
            await self._leave_early(client, body)
            return
        response = await client.post(f"{self._url}/v1/completions", json=body)
        if response.status_code == 429:
            self.num_requests["refused (429)"] += 1
            return
        response.raise_for_status()
        texts = [choice["text"] for choice in response.json()["choices"]]
        if kind in ("seeded", "greedy") and texts[0] != self._first_answers.setdefault((kind, prompt), texts[0]):
            self.faults.append(f"{kind} answer to {prompt!r} changed: {texts[0]!r}")

    async def _leave_early(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", f"{self._url}/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code == 429:
                self.num_requests["refused (429)"] += 1
                return
            response.raise_for_status()
            num_left = self._random.randrange(6)
            async for _ in response.aiter_lines():
                if (num_left := num_left - 1) < 0:
                    return

    async def _watch(self) -> None:
        while True:
            self.memory_mib.append(process_tree_memory(self._pid).pss_bytes / 2**20)
            await asyncio.sleep(MEMORY_PERIOD_S)

    async def _check_blocks(self, client: httpx.AsyncClient) -> None:
        replicas: list[dict[str, Any]] = []
        for _ in range(60):
            replicas = (await client.get(f"{self._url}/stats")).json()["replicas"]
            if replicas and all(each["num_free_blocks"] == each["num_blocks"] for each in replicas):
                return
            await asyncio.sleep(0.5)
        if not replicas:
            self.faults.append("no replica answers /stats")
        self.faults += [f"{each['num_blocks'] - each['num_free_blocks']} blocks are not returned" for each in replicas]

    def _check_memory(self) -> None:
        quarter = len(self.memory_mib) // 4
        if not quarter:
            self.faults.append("the run was too short to tell whether memory grows")
        else:
            second = statistics.median(self.memory_mib[quarter : 2 * quarter])
            last = statistics.median(self.memory_mib[-quarter:])
            if last > GROWTH * second:
                self.faults.append(f"memory grew from {second:.0f} to {last:.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pid", type=int, required=True, help="of the replica: its memory, and its children's, is watched"
    )
    options = parser.parse_args()
    load = LoadRun(options.url.rstrip("/"), options.clients, options.seed, options.pid)
    asyncio.run(load.run(60 * options.minutes))
    print_header(this_machine(), load.model)
    for kind, num in sorted(load.num_requests.items()):
        print(f"{kind:<14} {num:6d}")
    if load.memory_mib:
        least, most, last = min(load.memory_mib), max(load.memory_mib), load.memory_mib[-1]
        print(f"{'memory':<14} {least:.0f} to {most:.0f} MiB, {last:.0f} at the end")
    for fault in load.faults[:20]:
        print(f"FAULT {fault}")
    print_json({"requests": dict(load.num_requests), "faults": load.faults, "memory_mib": load.memory_mib}, None)
    return 1 if load.faults else 0


if __name__ == "__main__":
    sys.exit(main())
