"""The replicas behind their handle, as the engine that the protocol layer asks."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, cast

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


class ReplicaClient:
    """Streams from whichever replica Serve picks.

    Serve may lose a cancellation, so the ids of requests that are closed early are also told to every
    replica, several at a time.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._closed_early: list[str] = []
        self._aborts: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        """As `EngineClient` has it."""
        stream = cast(DeploymentResponseGenerator, self._streaming.generate.remote(request))
        ended = False
        try:
            async for item in stream:
                if isinstance(item, Refused):
                    ended = True
                    raise _error_of(item)
                yield item
            ended = True
        except BackPressureError as error:
            ended = True
            raise QueueFullError(str(error)) from None
        except (RayActorError, DeploymentUnavailableError) as error:
            ended = True
            raise EngineUnavailableError("the replica that held this request is gone; send it again") from error
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


def _error_of(refused: Refused) -> Exception:
    kinds: dict[Any, type[Exception]] = {
        "invalid": ValueError,
        "overloaded": QueueFullError,
        "unavailable": EngineUnavailableError,
    }
    return kinds[refused.reason](refused.message)
