"""How far an offline run has come."""

import time
from collections.abc import Callable

from tqdm import tqdm

from app.engine.outputs import SequenceDelta


class ProgressBar:
    """Finished requests on a bar, with the rate of new tokens."""

    def __init__(self, num_requests: int, enabled: bool) -> None:
        self._bar = tqdm(total=num_requests, desc="Generating", unit="request", disable=not enabled)
        self._num_tokens = 0
        self._start = time.perf_counter()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, deltas: list[SequenceDelta], request_finished: Callable[[str], bool]) -> None:
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        finished = {delta.request_id for delta in deltas if delta.finished and request_finished(delta.request_id)}
        if finished:
            rate = self._num_tokens / (time.perf_counter() - self._start)
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update(len(finished))
