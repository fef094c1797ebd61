"""An HTTP client without a network that sees each chunk as it is sent, and may hang up."""

import asyncio
import json
from typing import Any


class AsgiCall:
    """One request to an ASGI application, running in the background.

    >>> call = AsgiCall(app, "POST", "/v1/completions", {"model": "m", "prompt": "x"})
    >>> await call.chunk()      # the next piece of the body; b"" after the last
    >>> await call.hang_up()    # the client goes; returns when the application has
    """

    def __init__(self, app: Any, method: str, path: str, body: Any = None, *, more_body: bool = False) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": raw, "more_body": more_body})
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status: int | None = None
        self.send_fails = False  # a server whose connection is gone raises OSError
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }
        self.task = asyncio.create_task(app(scope, self._received.get, self._send))

    async def chunk(self, timeout_s: float = 5.0) -> bytes:
        while True:
            message = await asyncio.wait_for(self._sent.get(), timeout_s)
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message["body"] or not message.get("more_body", False):
                return message["body"]

    def has_chunk(self) -> bool:
        return not self._sent.empty()

    async def hang_up(self, timeout_s: float = 5.0) -> None:
        self._received.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(self.task, timeout_s)

    async def _send(self, message: dict[str, Any]) -> None:
        if self.send_fails:
            raise OSError("connection lost")
        self._sent.put_nowait(message)
