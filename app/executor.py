"""Where steps run."""

from typing import Protocol

from app.engine.plan import StepPlan, StepResult
from app.worker import Worker


class Executor(Protocol):
    """Carries plans to every rank of the target and brings rank 0's result back."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def stats(self) -> dict[str, float]:
        """What rank 0 knows beyond the results of steps: the controller's totals."""
        ...

    def shutdown(self) -> None: ...


class LocalExecutor:
    """One rank, in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def execute(self, plan: StepPlan) -> StepResult:
        return self.worker.speculative_step(plan)

    def stats(self) -> dict[str, float]:
        return self.worker.stats()

    def shutdown(self) -> None:
        """Nothing outlives this process."""
