"""Whose request it is, without keeping the key that tells it."""

import hashlib

from fastapi import Request

_DIGEST_BYTES = 8


def owner_of(http_request: Request) -> int:
    """A digest of the Authorization header in int64; 0 for requests without one, which are one owner's.

    The key goes no further than this function. Nothing is checked by it: whoever sends a key shares what that key
    remembers, and no more.
    """
    scheme, _, credentials = http_request.headers.get("authorization", "").strip().partition(" ")
    if not scheme:
        return 0
    text = f"{scheme.lower()} {credentials.strip()}".encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"forerun owner").digest()
    return int.from_bytes(digest, "little", signed=True)
