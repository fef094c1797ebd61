"""The replicas behind their handle, as the engine that the protocol layer asks."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from grpc.aio import AioRpcError
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from app.api.errors import EngineUnavailableError, QueueFullError
from app.engine.outputs import GenerationRequest, SequenceDelta
from app.serve.messages import Refused

logger = logging.getLogger("ray.serve")

ABORT_PERIOD_S = 0.25
MAX_ABORT_ATTEMPTS = 20
HEALTH_TIMEOUT_S = 5.0
RETRY_PERIOD_S = 0.5


class _LostError(Exception):
    """A replica ended, with the request in it or before it came; None where that is not known."""

    def __init__(self, message: str, held_request: bool | None) -> None:
        super().__init__(message)
        self.held_request = held_request


class ReplicaClient:
    """Streams from whichever replica Serve picks.

    A request whose replica is lost before anything of its answer was passed on is sent once more; a replica that never
    began it does not count, nor does, once it is being sent again, one whose process goes before the first item. Serve
    may lose a cancellation, so the ids of requests that are closed early are also told to every replica, several at a
    time.
    """

    def __init__(self, handle: DeploymentHandle, retry_limit_s: float) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._retry_limit_s = retry_limit_s  # for replicas that take the place of lost ones to come up
        self._closed_early: list[str] = []
        self._aborts: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        """As `EngineClient` has it."""
        may_send_again, deadline, attempt = True, time.monotonic() + self._retry_limit_s, 0
        while True:
            attempt += 1
            # Serve is asked under a new name: the lost replica may still know the old one.
            sent = replace(request, request_id=f"{request.request_id}-{attempt}") if attempt > 1 else request
            passed_on = False
            try:
                async with aclosing(self._attempt(sent)) as stream:
                    if request.streamed:
                        async for deltas in stream:
                            passed_on = True
                            yield _renamed(deltas, request.request_id)
                    else:
                        whole = [deltas async for deltas in stream]
                        passed_on = True
                        for deltas in whole:
                            yield _renamed(deltas, request.request_id)
                return
            except _LostError as lost:
                may_wait = not passed_on and time.monotonic() < deadline
                held_request = may_send_again if lost.held_request is None else lost.held_request
                if not may_wait or (held_request and not may_send_again):
                    raise EngineUnavailableError(str(lost)) from lost
                may_send_again = may_send_again and not held_request
                logger.warning("Request %s is sent again: %s", request.request_id, lost)
            await asyncio.sleep(RETRY_PERIOD_S)

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        stream = cast(DeploymentResponseGenerator, self._streaming.generate.remote(request))
        ended, has_begun = False, False
        try:
            async for item in stream:
                if isinstance(item, Refused):
                    ended = True
                    raise _error_of(item)
                has_begun = True
                yield item
            ended = True
        except BackPressureError as error:
            ended = True
            raise QueueFullError(str(error)) from None
        except DeploymentUnavailableError as error:
            ended = True
            raise EngineUnavailableError(f"no replica runs, and none is on its way: {error}") from error
        except (RayActorError, AioRpcError) as error:  # of an actor's call; of gRPC, where Serve is told to use it
            ended = True
            message = "the replica that held this request is gone; send it again"
            raise _LostError(message, held_request=True if has_begun else None) from error
        finally:
            if not ended:
                stream.cancel()
                self._abort(request.request_id)

    async def check_health(self) -> None:
        try:
            await asyncio.wait_for(self._handle.check_health.remote(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise EngineUnavailableError(f"no replica has answered within {HEALTH_TIMEOUT_S:g} s") from None
        except Exception as error:
            raise EngineUnavailableError(str(getattr(error, "cause", error))) from error

    async def stats(self) -> list[dict[str, Any]]:
        """Of every replica that answers."""
        try:
            answers = await self._handle.broadcast("stats").results_async(return_exceptions=True)
        except DeploymentUnavailableError:  # none runs at this moment: starting, or taking a new user_config over
            return []
        return [answer for answer in answers if not isinstance(answer, Exception)]

    def _abort(self, request_id: str) -> None:
        self._closed_early.append(request_id)
        if self._aborts is None or self._aborts.done():
            self._aborts = asyncio.get_running_loop().create_task(self._send_aborts())

    async def _send_aborts(self) -> None:
        while self._closed_early:
            await asyncio.sleep(ABORT_PERIOD_S)
            request_ids, self._closed_early = self._closed_early, []
            for attempt in range(1, MAX_ABORT_ATTEMPTS + 1):
                try:
                    await self._handle.broadcast("abort", request_ids).results_async(return_exceptions=True)
                    break
                except Exception as error:  # e.g. no replica runs while one takes a new user_config over
                    if attempt == MAX_ABORT_ATTEMPTS:  # the replicas' own time limit is left to end these requests
                        num = len(request_ids)
                        logger.warning("Could not tell the replicas that %d clients are gone: %s", num, error)
                await asyncio.sleep(ABORT_PERIOD_S)


def _renamed(deltas: list[SequenceDelta], request_id: str) -> list[SequenceDelta]:
    for delta in deltas:
        delta.request_id = request_id
    return deltas


def _error_of(refused: Refused) -> Exception:
    kinds: dict[Any, type[Exception]] = {
        "invalid": ValueError,
        "overloaded": QueueFullError,
        "unavailable": EngineUnavailableError,
    }
    if refused.reason in ("lost", "dead"):
        return _LostError(refused.message, held_request=refused.reason == "lost")
    return kinds[refused.reason](refused.message)
