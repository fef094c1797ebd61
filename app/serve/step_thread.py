"""The thread of a rank that carries plans out."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future

from app.engine.plan import StepPlan, StepResult

Step = Callable[[StepPlan], StepResult | None]


class StepThread:
    """Carries plans out in the order of their ids, counted from 0, whichever threads bring them in whichever order.

    A plan that waits here starts the moment the one before it ends, before that one's result is packed and sent. One
    thread for all of them, since each that computes keeps scratch memory, and a team of OpenMP's for torch's operators.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._waiting: dict[int, tuple[StepPlan, Future[StepResult | None]]] = {}
        self._arrival = threading.Condition()
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def carry_out(self, plan: StepPlan) -> StepResult | None:
        """Waits for the plan's turn and its step; raises what the step raised."""
        future: Future[StepResult | None] = Future()
        with self._arrival:
            self._waiting[plan.step_id] = (plan, future)
            self._arrival.notify()
        return future.result()

    def _run(self) -> None:
        for step_id in itertools.count():
            with self._arrival:
                while step_id not in self._waiting:
                    self._arrival.wait()
                plan, future = self._waiting.pop(step_id)
            try:
                future.set_result(self._step(plan))
            except BaseException as error:  # whatever it is, it belongs to the one who waits for this step
                future.set_exception(error)
            del plan, future  # until the next one comes nothing of this one is kept
