"""What the protocol layer needs of an engine, wherever that engine runs."""

from collections.abc import AsyncGenerator
from typing import Protocol

from app.engine.outputs import GenerationRequest, SequenceDelta


class EngineClient(Protocol):
    """An engine in this process, or a handle to one elsewhere."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SequenceDelta], None]:
        """A request's deltas, all of a step in one list; closing or cancelling the generator aborts the request.

        Raises, before the first delta: ValueError for a request that the engine refuses, QueueFullError where
        it has no room, EngineUnavailableError where nobody can answer. Whatever comes later ends the stream.
        """
        ...

    async def check_health(self) -> None:
        """Raises where no answer is to be expected."""
        ...
