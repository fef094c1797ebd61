"""An executor with plans on their way, as over a network, but with its rank in this process."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from app.engine.plan import StepPlan, StepResult
from app.llm_engine import LLMEngine
from app.worker import Worker


class DeferringExecutor:
    """Carries plans out one after another: ahead of whoever takes their results, or only when they are taken."""

    num_microbatches: int | None = None

    def __init__(self, worker: Worker, max_in_flight: int = 2, ahead: bool = True) -> None:
        self.worker = worker
        self.max_in_flight = max_in_flight
        self.max_num_out = 0  # plans that were out at once
        self.num_shutdowns = 0
        self._num_out = 0
        self._thread = ThreadPoolExecutor(1) if ahead else None

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._num_out += 1
        self.max_num_out = max(self.max_num_out, self._num_out)
        assert self._num_out <= self.max_in_flight
        step = partial(self.worker.speculative_step, plan)
        if self._thread is not None:
            future: Future[StepResult] = self._thread.submit(step)
            step = future.result
        return partial(self._take, step)

    def check_health(self) -> None:
        """Its rank is this process."""

    def stats(self) -> dict[str, float]:
        return self.worker.stats()

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self, step: Callable[[], StepResult]) -> StepResult:
        self._num_out -= 1
        return step()


def defer(engine: LLMEngine, max_in_flight: int = 2, ahead: bool = True) -> LLMEngine:
    """Gives an engine a `DeferringExecutor`, under its own worker."""
    engine.executor = DeferringExecutor(engine.executor.worker, max_in_flight, ahead)
    return engine
