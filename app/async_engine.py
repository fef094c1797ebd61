"""The engine behind an event loop: steps run in a thread of their own, deltas arrive in the loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine_config import EngineConfig
from app.llm_engine import LLMEngine
from app.own_thread import run_in_own_thread

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

WATCH_PERIOD_S = 1.0
DELIVERY_S, MOST_PAUSE_S = 0.006, 0.2
"""Between two deliveries to a request, for each request that is open, and at most: below the time of a step for few."""


class EngineDeadError(RuntimeError):
    """The step loop ended with an exception of ours; the engine must be replaced."""


class EngineStalledError(RuntimeError):
    """Work is pending, and neither a step nor a call has finished for longer than the limit."""


def until_delivery(now: float, num_open_requests: int) -> float:
    """Seconds from `now` to the next of the moments at which streams are given what has come."""
    period = min(DELIVERY_S * num_open_requests, MOST_PAUSE_S)
    return period - now % period


class AsyncEngine:
    """Runs an LLMEngine's steps in one thread, which alone touches it.

    Everything else reaches the engine as a call in the thread's inbox, carried out between two steps.
    """

    def __init__(self, engine: LLMEngine, stall_limit_s: float = 60.0) -> None:
        self._engine = engine
        self._stall_limit_s = stall_limit_s
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # owned by the loop
        self._stopped: EngineDeadError | EngineStalledError | None = None
        self._last_progress = time.monotonic()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()
        self._watchdog = self._loop.create_task(self._watch())

    @classmethod
    async def create(cls, config: EngineConfig, *, progress: bool = True, stall_limit_s: float = 60.0) -> "AsyncEngine":
        """Loads the model in a thread, so that the event loop stays free.

        Raises ValueError for a configuration that cannot be honoured.
        """
        engine = await asyncio.wrap_future(run_in_own_thread(lambda: LLMEngine(config, progress=progress)))
        return cls(engine, stall_limit_s)

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    @property
    def engine(self) -> LLMEngine:
        """For what never changes once loaded (tokenizer, limits); the rest belongs to the step thread."""
        return self._engine

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        """A request's deltas, one a choice at a time; closing the iterator aborts the request.

        The first comes at once, and so does the end. With many requests open what lies between comes some steps at a
        time, to all of them at the same moments: deliveries take the processes on their way some time, which is the
        engine's where cores are few, and less of it when they come together.

        Raises ValueError for a request that the engine refuses, before the first delta; EngineDeadError
        where the step loop has failed.
        """
        if request.request_id in self._streams:
            raise ValueError(f"request_id {request.request_id!r} is in use: choose another")
        stream = self._streams[request.request_id] = _Stream(request.n)
        try:
            await self._call(lambda: self._engine.add_request(request))
            while not stream.finished:
                yield await stream.next_deltas()
                pause_s = until_delivery(self._loop.time(), len(self._streams)) if request.streamed else None
                await stream.rest(pause_s)
        finally:
            self._streams.pop(request.request_id, None)
            if not stream.finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps; nothing happens where it has ended already."""
        self._inbox.put(_Call(lambda: self._engine.abort_request(request_id)))

    async def stats(self) -> dict[str, Any]:
        return await self._call(self._engine.stats)

    async def set_num_speculative_tokens(self, num: int) -> None:
        """Changes the draft length of all later steps.

        Raises ValueError for a number that the engine was not built for.
        """
        await self._call(lambda: self._engine.set_num_speculative_tokens(num))

    @property
    def stop_reason(self) -> EngineDeadError | EngineStalledError | None:
        """Why nothing is to be expected any more; None while the engine runs."""
        return self._stopped

    def check_health(self) -> None:
        """Raises where no answer is to be expected: what the executor raises for a lost rank, EngineDeadError, or
        EngineStalledError.

        The engine ends its ranks when it stops, and the executor then speaks of that end: see `stop_reason`.
        """
        self._engine.executor.check_health()
        if self._stopped is not None:
            raise self._stopped
        if (stall := self._stall()) is not None:
            raise stall

    def shutdown(self) -> None:
        """Ends the step thread after the step in flight; open requests get EngineDeadError."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the watchdog with it
            self._loop.call_soon_threadsafe(self._watchdog.cancel)
        self._inbox.put(None)
        self._thread.join(timeout=self._stall_limit_s)

    def _stall(self) -> EngineStalledError | None:
        if not self._busy:  # read first: the step thread sets it after the time that is read next
            return None
        age = time.monotonic() - self._last_progress
        if age <= self._stall_limit_s:
            return None
        return EngineStalledError(f"work is pending, and no step has finished for {age:.0f} s")

    async def _watch(self) -> None:
        """Gives a step up that hangs: open requests are told at once, and ranks that can be ended are."""
        while self._stopped is None:
            await asyncio.sleep(min(self._stall_limit_s / 4, WATCH_PERIOD_S))
            if (stall := self._stall()) is not None:
                logger.error("The step loop hangs: %s", stall)
                self._stop(stall)
                await asyncio.to_thread(self._engine.executor.shutdown)

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` in the step thread, between two steps."""
        if self._stopped is not None:
            raise self._stopped
        call = _Call(function)
        self._inbox.put(call)
        # Shielded: a caller that is cancelled must not cancel a call that the thread is carrying out.
        return await asyncio.shield(asyncio.wrap_future(call.future))

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._drain_inbox():
                deltas = self._engine.step()
                self._last_progress = time.monotonic()
                if deltas:
                    self._loop.call_soon_threadsafe(self._dispatch, deltas)
        except BaseException as error:
            logger.exception("The step loop failed")
            failure = error
        self._busy = False
        self._engine.shutdown()
        reason = EngineDeadError(f"the step loop failed: {failure!r}" if failure else "the engine was shut down")
        reason.__cause__ = failure
        try:
            self._loop.call_soon_threadsafe(self._stop, reason)
        except RuntimeError:
            logger.debug("The event loop is closed: nobody waits for the engine any more")

    def _drain_inbox(self) -> bool:
        """Carries out what has come in, waiting while there is nothing to step; False to end."""
        while True:
            idle = not self._engine.has_work
            self._busy = not idle
            try:
                call = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            if idle:
                self._last_progress = time.monotonic()
                self._busy = True  # a call may ask a rank, and hang with it
            call.run()

    def _stop(self, reason: EngineDeadError | EngineStalledError) -> None:
        """In the loop, after the last step or when it hangs: everyone who waits, or will, is told."""
        self._stopped = self._stopped or reason
        for stream in self._streams.values():
            stream.fail(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._inbox.get_nowait()) is not None:
                    call.future.set_exception(reason)
        self._inbox.put(None)  # a step thread that comes back has nothing left to do

    def _dispatch(self, deltas: list[SequenceDelta]) -> None:
        by_request: dict[str, list[SequenceDelta]] = defaultdict(list)
        for delta in deltas:
            by_request[delta.request_id].append(delta)
        for request_id, own in by_request.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.put(own)


class _Call(Generic[Result]):
    """A call on its way to the step thread, and its result on the way back."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self.future: Future[Result] = Future()

    def run(self) -> None:
        try:
            self.future.set_result(self._function())
        except BaseException as error:
            self.future.set_exception(error)


class _Stream:
    """Deltas of one request on their way to its consumer; one that is late gets several steps as one."""

    def __init__(self, n: int) -> None:
        self._num_unfinished = n
        self._deltas: dict[int, SequenceDelta] = {}  # by choice, not taken yet
        self._failure: Exception | None = None
        self._ready = asyncio.Event()
        self._over = asyncio.Event()  # nothing more will come

    @property
    def finished(self) -> bool:
        """All choices have ended and all deltas were taken."""
        return self._num_unfinished == 0 and not self._deltas

    def put(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            if (waiting := self._deltas.get(delta.index)) is not None:
                waiting.append(delta)
            else:
                self._deltas[delta.index] = delta
            self._num_unfinished -= delta.finished
        if self._num_unfinished == 0:
            self._over.set()
        self._ready.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._over.set()
        self._ready.set()

    async def rest(self, seconds: float | None) -> None:
        """Lets so much time pass, or as much as there is to the end; None: all of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    async def next_deltas(self) -> list[SequenceDelta]:
        await self._ready.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        self._ready.clear()
        deltas, self._deltas = self._deltas, {}
        if self._failure is not None:
            self._ready.set()
        return list(deltas.values())
