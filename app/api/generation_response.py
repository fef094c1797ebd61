"""The response that runs a generation: whole or streamed, ended by its client or by an error."""

import asyncio
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.api import sse
from app.api.delta_streams import PromptDeltas
from app.api.errors import APIError, as_api_error
from app.api.responder import Responder


class GenerationResponse(Response):
    """Nothing is sent before the first step is there: what fails until then has a status of its own.

    The client is watched all the while, queueing and prefill included; when it goes, the deltas' generator
    is closed, which aborts the request in the engine.
    """

    def __init__(self, deltas: PromptDeltas, responder: Responder, *, stream: bool, request_id: str) -> None:
        super().__init__()
        self._deltas = deltas
        self._responder = responder
        self._stream = stream
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(send))
        departure = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            departure.cancel()
            if not answer.done():
                answer.cancel()
            # Waiting lets the engine's generator run its own clean-up before this request counts as over.
            await asyncio.gather(answer, departure, return_exceptions=True)
        error = None if answer.cancelled() else answer.exception()
        if error is not None and not isinstance(error, ClientDisconnect):
            raise error

    async def _answer(self, send: Send) -> None:
        async with aclosing(self._deltas) as deltas:
            if self._stream:
                await self._send_stream(deltas, _Sender(send))
            else:
                await self._send_whole(deltas, _Sender(send))

    async def _send_stream(self, deltas: PromptDeltas, sender: "_Sender") -> None:
        started = False
        try:
            async for prompt, step in deltas:
                events = self._responder.events(prompt, step)
                if not started:
                    await sender.start(200, sse.HEADERS)
                    started = True
                if events:
                    await sender.body(events, more=True)
            await sender.body(self._responder.last_events(), more=False)
        except ClientDisconnect:
            raise
        except Exception as error:
            api_error = as_api_error(error, self._request_id)
            if started:
                await sender.body(sse.encode_error(api_error), more=False)
            else:
                await sender.error(api_error)

    async def _send_whole(self, deltas: PromptDeltas, sender: "_Sender") -> None:
        try:
            async for prompt, step in deltas:
                self._responder.add(prompt, step)
            body = self._responder.body()
        except Exception as error:
            await sender.error(as_api_error(error, self._request_id))
            return
        await sender.start(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        await sender.body(body, more=False)


async def _departure(receive: Receive) -> None:
    """Returns when the client has gone. The body has been read by now, so nothing else is to come."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Sender:
    """ASGI's messages; a client that has gone is a ClientDisconnect, so that it is no error of the engine's."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self, status_code: int, headers: dict[str, str]) -> None:
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._deliver({"type": "http.response.start", "status": status_code, "headers": raw})

    async def body(self, body: bytes, *, more: bool) -> None:
        await self._deliver({"type": "http.response.body", "body": body, "more_body": more})

    async def error(self, error: APIError) -> None:
        body = error.body()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
        await self.start(error.status_code, headers)
        await self.body(body, more=False)

    async def _deliver(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientDisconnect from error
