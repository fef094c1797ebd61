"""Streaming requests to an OpenAI-compatible server, timed at the client.

By aiohttp: on a machine that serves itself the client takes its share of the same cores, and httpx three times as much.
"""

import asyncio
import json
import time
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import aiohttp


@dataclass
class StreamResult:
    """One answer. Times are seconds from when the request was sent."""

    first_s: float | None = None
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)  # arrivals of chunks with text
    num_tokens: int = 0
    speculation: dict[str, Any] | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks; all tokens of a step travel as one."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def token_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_tokens - 1)


class CompletionClient:
    """Sends bodies to one endpoint of a server, many at once."""

    def __init__(self, url: str, endpoint: str, timeout_s: float) -> None:
        self._address = url.rstrip("/") + endpoint
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)

    async def stream_all(self, bodies: list[dict[str, Any]]) -> list[StreamResult]:
        """One connection a body, all at once."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout) as session:
            return await asyncio.gather(*(self._stream(session, body) for body in bodies))

    async def _stream(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> StreamResult:
        """Raises RuntimeError with the server's words where it refuses or breaks off."""
        result, start, done = StreamResult(), time.perf_counter(), False
        async with session.post(self._address, json=body) as response:
            if response.status != 200:
                text = (await response.read()).decode(errors="replace")
                raise RuntimeError(f"{self._address} answered {response.status}: {text[:500]}")
            async for line in response.content:
                event = line.removeprefix(b"data: ").rstrip()
                if event == b"[DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    _read_event(result, json.loads(event), time.perf_counter() - start)
        result.end_s = time.perf_counter() - start
        if not done:
            raise RuntimeError(f"{self._address} ended a stream before [DONE]")
        return result


def _read_event(result: StreamResult, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        raise RuntimeError(f"the server broke off: {event['error']}")
    for choice in event.get("choices", []):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            result.first_s = now if result.first_s is None else result.first_s
            result.chunk_s.append(now)
    if event.get("usage"):
        result.num_tokens = event["usage"]["completion_tokens"]
    if event.get("speculation_metrics"):
        result.speculation = event["speculation_metrics"]


def first_model(url: str) -> str:
    """Id of the first model that the server lists.

    Raises ValueError where nothing answers.
    """
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says
        with direct.open(url.rstrip("/") + "/v1/models", timeout=10) as response:
            return json.load(response)["data"][0]["id"]
    except (OSError, HTTPException) as error:
        raise ValueError(f"--url is {url}: no server answers there ({error}); start one with `make serve`") from None
