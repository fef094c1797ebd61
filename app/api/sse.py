"""Server-sent events: one `data` line each, ended by an empty line."""

from pydantic import BaseModel

from app.api.errors import APIError

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that collect a response would take the streaming out of it
}


def encode_event(chunk: BaseModel) -> bytes:
    """JSON escapes line ends, so that an event is one line. Fields that were never set are left out."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()


def encode_error(error: APIError) -> bytes:
    return b"data: " + error.body() + b"\n\n"
