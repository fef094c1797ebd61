"""What Ray Serve itself takes: the engine alone, beside a Serve that is idle, and beside the least that can stream.

    python -m benchmarks.serve_floor --model .cache/models/SmolLM2-135M-Instruct

The least is an ingress that hands every request on to a replica, and a replica that says the same words as often as
ours delivers with many streams, five times a second: nothing is read but the body, nothing computed. What the
engine keeps beside it is the most that an application of Serve can reach on these cores; the time to its first chunk
is what a first token takes on top of the step that makes it.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from app.async_engine import MOST_PAUSE_S
from app.llm_engine import LLMEngine
from app.serve.launch import schedule_as_batch, tell_ray
from benchmarks.engine_runs import EngineRunner
from benchmarks.http_client import CompletionClient
from benchmarks.machine import this_machine
from benchmarks.report import format_table, print_header, print_json
from benchmarks.workloads import NUM_NEW_TOKENS, PromptSet, Workload

ENDPOINT = "/v1/completions"
NUM_DELIVERIES = 25  # an answer of 128 tokens, at the rate of 32 streams on two cores
NUM_FIRST_CHUNKS, REST_S = 40, 0.15  # between them everything rests for about as long as a prompt's step takes
STATES = ("alone", "beside an idle Serve", "beside streams of Serve")


@serve.deployment(max_ongoing_requests=1000)
class LeastReplica:
    async def generate(self, prompt: list[int], num_deliveries: int) -> AsyncIterator[tuple[str, list[int]]]:
        """The same words, to all streams at the same moments; the first at once."""
        loop = asyncio.get_running_loop()
        for index in range(num_deliveries):
            if index > 0:
                await asyncio.sleep(MOST_PAUSE_S - loop.time() % MOST_PAUSE_S)
            yield " and so on, and", [1, 2, 3, 4, 5]


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress()
class LeastIngress:
    def __init__(self, replica: DeploymentHandle) -> None:
        self._replica = replica.options(stream=True)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route(ENDPOINT, self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> StreamingResponse:
        body = await request.json()

        async def events() -> AsyncIterator[str]:
            async for text, _ in self._replica.generate.remote(body["prompt"], body["max_tokens"]):
                yield f'data: {{"choices": [{{"index": 0, "text": "{text}", "finish_reason": null}}]}}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def serve_the_least(connection: Connection, prompts: list[list[int]], long_prompts: list[list[int]]) -> None:
    """Serve and its client: sends milliseconds to first chunks, then streams at one word and ends at the next."""
    tell_ray()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(address="local", log_to_driver=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(LeastIngress.bind(LeastReplica.bind()))
    client = CompletionClient(f"http://127.0.0.1:{port}", ENDPOINT, timeout_s=60)
    first_ms = []
    for index in range(NUM_FIRST_CHUNKS):
        body = {"prompt": long_prompts[index % len(long_prompts)], "max_tokens": 1}
        [result] = asyncio.run(client.stream_all([body]))
        assert result.first_s is not None
        first_ms.append(1e3 * result.first_s)
        time.sleep(REST_S)
    connection.send(first_ms)
    connection.recv()
    while not connection.poll():
        asyncio.run(client.stream_all([{"prompt": prompt, "max_tokens": NUM_DELIVERIES} for prompt in prompts]))
    serve.shutdown()
    ray.shutdown()


def run_round(runner: EngineRunner, prompts: PromptSet, workload: Workload) -> tuple[dict[str, float], list[float]]:
    """Tokens per second of each state, and milliseconds to first chunks. Serve starts and ends with the round.

    Raises RuntimeError where Serve ends before it was told to; why is its own output.
    """
    waves = prompts.waves(workload)

    def rate() -> float:
        run = runner.run(waves * 3, NUM_NEW_TOKENS)
        return sum(map(len, run.token_ids)) / run.wall_s

    rates = [rate()]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_the_least, args=(theirs, waves[0], prompts.long_prompts))
    process.start()
    theirs.close()
    try:
        with ours:  # closed, whatever happens, which ends Serve
            first_ms = ours.recv()
            rates.append(rate())
            ours.send("stream")
            rates.append(rate())
            ours.send("end")
    except (EOFError, BrokenPipeError):
        raise RuntimeError("Serve has ended early: its own output above says why") from None
    finally:
        process.join()
    return dict(zip(STATES, rates, strict=True)), first_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or .gguf file")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    schedule_as_batch()  # as what `make serve` starts
    sizes = {"max_model_len": 1024, "max_num_seqs": options.streams, "enable_prefix_caching": False}
    try:
        runner = EngineRunner(LLMEngine(model=options.model, progress=False, **sizes))
    except ValueError as error:
        raise SystemExit(f"serve_floor: {error}") from None
    prompts, workload = PromptSet(runner.engine.loaded.vocab_size), Workload(options.streams, "open")
    runner.run(prompts.waves(workload), num_new_tokens=8)
    print_header(this_machine(), options.model, load=f"{os.getloadavg()[0]:.1f} processes at the start")
    rounds, first_ms = [], []
    for _ in range(options.rounds):
        rates, own_first_ms = run_round(runner, prompts, workload)
        rounds.append(rates)
        first_ms.extend(own_first_ms)
    runner.engine.shutdown()
    rows = []
    for state in STATES:
        share = statistics.median(rates[state] / rates["alone"] for rates in rounds)
        median = statistics.median(rates[state] for rates in rounds)
        rows.append([f"the engine {state}", f"{median:.0f}", f"{share:.2f}"])
    print(format_table(["", "tokens/s", "x alone"], rows, num_left=1))
    print(f"first chunk of the least answer to a 512-token prompt: {statistics.median(first_ms):.1f} ms")
    print_json({"benchmark": "serve_floor", "rounds": rounds, "first_chunk_ms": first_ms}, None)


if __name__ == "__main__":
    main()
