"""How long the server takes from a fault to its next answer, for the summary at the end of a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIME_TO_RECOVER = "time to recover"

RecordProperty = Callable[[str, object], None]
"""pytest's fixture `record_property`."""


@contextmanager
def timed(record_property: RecordProperty, fault: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    record_property(TIME_TO_RECOVER, f"{fault}: {time.monotonic() - start:.1f} s")
