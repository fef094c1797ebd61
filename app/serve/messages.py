"""What a replica says to an ingress about a request, beside its deltas."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Refused:
    """The last item of a stream that ends without its answer; an item, so that Serve logs no traceback for it.

    invalid: the request is at fault. overloaded: the queue is full. unavailable: the replica cannot answer it.
    """

    reason: Literal["invalid", "overloaded", "unavailable"]
    message: str
