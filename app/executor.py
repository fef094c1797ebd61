"""Where steps run."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from app.engine.plan import StepPlan, StepResult
from app.worker import Worker

PendingStep = Callable[[], StepResult]
"""A plan on its way: waits for the step's result, or raises what the step raised. Taken once, oldest first."""


class Executor(Protocol):
    """Carries plans to every rank of the target, which carry them out in order, and brings rank 0's results back."""

    max_in_flight: int  # plans that may be out before the oldest one's result is taken

    @property
    def num_microbatches(self) -> int | None:
        """Plans that running sequences take turns in, one at a time each; None: every plan takes them all."""
        ...

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def stats(self) -> dict[str, float]:
        """What rank 0 knows beyond the results of steps: the controller's totals."""
        ...

    def check_health(self) -> None:
        """Raises where a rank is gone for good."""
        ...

    def shutdown(self) -> None:
        """Ends the ranks, whatever they are doing; a step that is waited for raises. May be called again."""
        ...


class LocalExecutor:
    """One rank, in this process: a step runs when its result is taken."""

    max_in_flight = 1
    num_microbatches = None

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def submit(self, plan: StepPlan) -> PendingStep:
        return partial(self.worker.speculative_step, plan)

    def stats(self) -> dict[str, float]:
        return self.worker.stats()

    def check_health(self) -> None:
        """While this process lives its rank does."""

    def shutdown(self) -> None:
        """Nothing outlives this process."""
