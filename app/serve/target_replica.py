"""The deployment that holds the model: one engine, its admission and its health."""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import RayActorError

from app.config import AppConfig, UserConfig
from app.config_errors import starts_with_field
from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine.sampling_params import SamplingParams
from app.serve.autoscaling import load_of
from app.serve.messages import ModelDescription, Refused
from app.serve.metrics import ReplicaMetrics
from app.serve.package_logs import log_with_serve
from app.serve.priority import warn_if_held_back
from app.serve.stats_reporter import StatsReporter

logger = logging.getLogger("ray.serve")

SWEEP_PERIOD_S = 1.0
MAX_ABORTED_IDS = 10_000
"""Ids remembered of requests that were aborted before they arrived."""

StreamItem = Refused | list[SequenceDelta]


class Engine(Protocol):
    """What the replica needs of `app.async_engine.AsyncEngine`."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[list[SequenceDelta]]: ...

    async def stats(self) -> dict[str, Any]: ...

    async def set_num_speculative_tokens(self, num: int) -> None: ...

    @property
    def stop_reason(self) -> Exception | None: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


EngineFactory = Callable[[AppConfig], Awaitable[tuple[Engine, ModelDescription]]]


async def load_engine(config: AppConfig) -> tuple[Engine, ModelDescription]:
    # Imported here: the process that builds the application imports this module, and has no use for torch.
    from app.async_engine import AsyncEngine
    from app.llm_engine import LLMEngine

    if config.num_threads is None and config.tensor_parallel_size == 1:
        # Ray tells numerical libraries to use as many threads as it reserved CPUs.
        config = config.model_copy(update={"num_threads": len(os.sched_getaffinity(0))})
    if config.tensor_parallel_size > 1 or config.has_draft_actor:
        from app.own_thread import run_in_own_thread
        from app.serve.processes import start_executor

        executor, loaded = await asyncio.wrap_future(run_in_own_thread(lambda: start_executor(config)))
        engine = AsyncEngine(LLMEngine.from_executor(config, executor, loaded), config.step_timeout_s)
        return engine, ModelDescription(loaded.folder, loaded.max_model_len, loaded.vocab_size)
    engine = await AsyncEngine.create(config, progress=True, stall_limit_s=config.step_timeout_s)
    loaded = engine.engine.loaded
    return engine, ModelDescription(loaded.folder, loaded.max_model_len, loaded.vocab_size)


@dataclass
class _OpenRequest:
    num_sequences: int
    deadline: float
    task: asyncio.Task[Any]
    timed_out: bool = False


class TargetReplica:
    """Streams the deltas of requests; counts sequences, and refuses those that its queue has no room for.

    Serve cancels the call of a client that is gone; should it lose the cancellation, the ingress's `abort`
    or, at last, `request_timeout_s` ends the request.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, engine_factory: EngineFactory = load_engine
    ) -> None:
        log_with_serve()
        warn_if_held_back(logger)
        self._config = config
        self._open: dict[str, _OpenRequest] = {}
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._sweeper: asyncio.Task[None] | None = None
        self._reporter: StatsReporter | None = None
        self._metrics = ReplicaMetrics(config.model_name)
        self._engine: Engine | None = None
        start = time.monotonic()
        try:
            self._engine, self._description = await engine_factory(config)
        except ValueError as error:
            raise ValueError(f"{'args.' * starts_with_field(str(error))}{error}") from error
        await self._warm_up()
        self._sweeper = asyncio.create_task(self._sweep())
        self._reporter = StatsReporter(self._engine.stats, self._metrics, config.log_stats_interval_s)
        logger.info("%s is loaded: %.1f s", config.model_name, time.monotonic() - start)

    async def reconfigure(self, user_config: Any) -> None:
        """Takes the deployment's `user_config` over while requests run.

        Raises ValueError for one that cannot be honoured; Serve then calls the deployment unhealthy.
        """
        parsed = UserConfig.parse(user_config)
        self._config.check_user_config(parsed)
        speculative = self._config.speculative_config
        if speculative is None:
            return
        num = parsed.num_speculative_tokens
        await self._running_engine.set_num_speculative_tokens(speculative.draft_limit if num is None else num)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamItem, None]:
        """Each step's deltas; `Refused` in place of what cannot follow."""
        if request.request_id in self._aborted:
            return
        meter = self._metrics.meter(request)
        if (refusal := self._refusal(request)) is not None:
            meter.refuse(refusal.reason)
            yield refusal
            return
        task = asyncio.current_task()
        assert task is not None
        entry = _OpenRequest(request.n, time.monotonic() + self._config.request_timeout_s, task)
        self._open[request.request_id] = entry
        deltas = self._running_engine.generate(request)
        try:
            async for step in deltas:
                meter.observe(step)
                yield step
        except asyncio.CancelledError:
            if not entry.timed_out:
                raise
            task.uncancel()
            meter.refuse("unavailable")
            message = f"the request has run for {self._config.request_timeout_s:g} s, the server's limit"
            yield Refused("unavailable", message)
        except ValueError as error:
            meter.refuse("invalid")
            yield Refused("invalid", str(error))
        except RuntimeError as error:
            meter.refuse("lost")
            yield Refused("lost", str(error))
        finally:
            meter.close()
            del self._open[request.request_id]
            await deltas.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_ids: list[str]) -> None:
        """Ends requests whose client is gone, those included that are yet to arrive."""
        for request_id in request_ids:
            self._aborted[request_id] = None
            if (entry := self._open.get(request_id)) is not None:
                entry.task.cancel()
        while len(self._aborted) > MAX_ABORTED_IDS:
            self._aborted.popitem(last=False)

    async def describe(self) -> ModelDescription:
        return self._description

    async def stats(self) -> dict[str, Any]:
        """The engine's counts, and the requests that are open here."""
        return {**await self._running_engine.stats(), "num_open_requests": len(self._open)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the autoscaling policy; never waits for a step."""
        return load_of(self._reporter.latest if self._reporter is not None else {})

    async def check_health(self) -> None:
        """Serve's question, also the ingress's; raises where work is pending and no step finishes.

        Serve replaces a replica at once for Ray's error alone, and shows its text and not its cause.
        """
        try:
            self._running_engine.check_health()
        except RayActorError as error:
            if (reason := self._running_engine.stop_reason) is None:
                raise
            raise RayActorError(error.actor_id, f"{reason}; then: {error}") from reason

    def __del__(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._reporter is not None:
            self._reporter.close()
        if self._engine is not None:
            self._engine.shutdown()

    @property
    def _running_engine(self) -> Engine:
        assert self._engine is not None, "Serve sends nothing before __init__ has returned"
        return self._engine

    def _refusal(self, request: GenerationRequest) -> Refused | None:
        try:
            self._running_engine.check_health()
        except Exception as error:  # Serve learns of it at its next check, and sends requests until then
            return Refused("dead", f"the engine has ended: {self._running_engine.stop_reason or error}")
        if request.request_id in self._open:
            return Refused("invalid", f"request_id {request.request_id!r} is in use: choose another")
        num_sequences = sum(entry.num_sequences for entry in self._open.values())
        limit = self._config.max_num_seqs + self._config.max_queued_requests
        if request.n > limit:
            return Refused("invalid", f"n is {request.n}: use at most {limit}, which the server can hold")
        if num_sequences + request.n > limit:
            return Refused(
                "overloaded",
                f"the server holds {num_sequences} sequences of at most {limit}, and this request adds {request.n}: "
                "try again later",
            )
        return None

    async def _warm_up(self) -> None:
        """A few real tokens: a replica that cannot make them must not call itself ready."""
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        request = GenerationRequest("warm-up", [0], params)
        async for step in self._running_engine.generate(request):
            for delta in step:
                if delta.error is not None:
                    raise RuntimeError(f"the model failed to continue a first prompt: {delta.error}")

    async def _sweep(self) -> None:
        """Ends requests that have outlived the time limit: nobody may be listening any more."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            now = time.monotonic()
            for request_id, entry in self._open.items():
                if now > entry.deadline and not entry.timed_out:
                    logger.warning("Request %s is ended after %g s", request_id, self._config.request_timeout_s)
                    entry.timed_out = True
                    entry.task.cancel()
