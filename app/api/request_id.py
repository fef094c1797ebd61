"""A request's id: the client's X-Request-Id where it is a sane one, else a new one, on every response."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import as_api_error

_SANE = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestIdMiddleware:
    """Names the request before anything can fail, and turns what nobody caught into an error response.

    `echo` false leaves the response's header to a server that writes one itself.
    """

    def __init__(self, app: ASGIApp, echo: bool = True) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._echo:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            logging.getLogger(__name__).debug("request %s: the client has gone", request_id)
        except Exception as error:
            response = as_api_error(error, request_id).response()
            if not started:
                await response(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id
