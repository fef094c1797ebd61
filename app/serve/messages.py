"""What a replica tells an ingress, beside the deltas of requests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelDescription:
    """What the protocol layer needs to know of the model."""

    folder: Path  # of the checkpoint, with its tokenizer
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class Refused:
    """The last item of a stream that ends without its answer; an item, so that Serve logs no traceback for it.

    invalid: the request is at fault. overloaded: the queue is full. unavailable: the replica has given it up.
    lost: the engine ended with the request in it. dead: it had ended before; another replica may answer.
    """

    reason: Literal["invalid", "overloaded", "unavailable", "lost", "dead"]
    message: str
