"""Where steps run."""

from typing import Protocol

from app.engine.plan import StepPlan, StepResult
from app.worker import Worker


class Executor(Protocol):
    """Carries plans to every rank of the target and brings rank 0's result back."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def shutdown(self) -> None: ...


class LocalExecutor:
    """One rank, in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def execute(self, plan: StepPlan) -> StepResult:
        return self.worker.speculative_step(plan)

    def shutdown(self) -> None:
        """Nothing outlives this process."""
