"""Where steps run whose drafts are made elsewhere."""

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from app.engine.plan import StepPlan, StepResult
from app.engine.sequence_state import SequenceState
from app.executor import Executor, PendingStep
from app.speculative.controller import Choice, DraftLengthController
from app.speculative.sequence_mirror import MirrorImage, SequenceMirror, essence

NUM_REMEMBERED_PLANS = 8
"""Plans without drafts, after which sequences no longer take turns."""


class RemoteDrafter(Protocol):
    """A `DetachedDrafter` at the other end of a wire. Its calls are carried out in order."""

    def has_started(self) -> bool:
        """It is loaded, and waits for `begin`. Never blocks."""
        ...

    def begin(self, image: MirrorImage) -> None:
        """Goes on from there with the next plan."""
        ...

    def draft(self, plan: StepPlan, results: list[StepResult]) -> Any:
        """Drafts on their way, for `StepPlan.drafts`."""
        ...

    def restart(self) -> None:
        """Ends it, whatever it does, and starts it anew. Does not wait for it."""
        ...

    def shutdown(self) -> None: ...


class DraftedExecutor:
    """Asks for the drafts of every plan, and sends it on with them on their way.

    The one that calls the drafter, so that the drafter hears of plans and results in their order. When drafts fail, or
    come too late, it is started anew; steps go on without until it is there, and it begins with what is known then.
    What such steps take and bring says nothing of drafts: the controller neither plans any for them nor learns of any.
    """

    max_in_flight = 2

    def __init__(
        self,
        executor: Executor,
        drafter: RemoteDrafter,
        state: SequenceState,
        controller: DraftLengthController | None,  # None: the plan's draft lengths stand
        num_microbatches: int,
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._mirror = SequenceMirror(state)
        self._controller = controller
        self._most_microbatches = num_microbatches
        self._has_drafts: deque[bool] = deque(maxlen=NUM_REMEMBERED_PLANS)
        self._results: list[StepResult] = []  # that the drafter has not heard of
        self._is_up = False
        self._life = 0  # the drafter's; a fault of an earlier one has been dealt with
        self._num_refused_drafts = dict.fromkeys(("controller", "fault"), 0)

    @property
    def num_microbatches(self) -> int:
        """One where there is nothing to draft: halves would read the target's weights twice for nothing."""
        return self._most_microbatches if any(self._has_drafts) else 1

    def submit(self, plan: StepPlan) -> PendingStep:
        if not self._is_up and self._drafter.has_started():
            self._drafter.begin(self._mirror.image())
            self._results.clear()
            self._is_up = True
            if self._controller is not None:
                self._controller.drafter_starts_anew()
        self._mirror.apply(plan)
        if not self._is_up:
            plan = self._limited("fault", plan, plan.with_draft_lengths([0] * len(plan.scheduled)))
        choice = Choice()
        if self._controller is not None:
            plan = self._limited("controller", plan, self._controller.plan(self._mirror.state, plan))
            choice = self._controller.choice
        if self._is_up:
            plan = replace(plan, drafts=self._drafter.draft(plan, self._results))
            self._results = []
        self._has_drafts.append(self._is_up and plan.num_draft_tokens > 0 and not choice.explores)
        return partial(self._take, self._executor.submit(plan), choice, self._life)

    def stats(self) -> dict[str, float]:
        stats = dict(self._executor.stats())
        stats["num_drafter_restarts"] = self._life
        for reason, num in self._num_refused_drafts.items():
            stats[f"num_refused_{reason}"] += num
        if self._controller is not None:
            stats |= self._controller.stats()
        return stats

    def check_health(self) -> None:
        """The drafter's is not in question: serving does not need it."""
        self._executor.check_health()

    def shutdown(self) -> None:
        self._drafter.shutdown()
        self._executor.shutdown()

    def _limited(self, reason: str, before: StepPlan, after: StepPlan) -> StepPlan:
        """The plan `after`, with the drafts that it leaves out counted."""
        self._num_refused_drafts[reason] += before.num_draft_tokens - after.num_draft_tokens
        return after

    def _take(self, pending_step: PendingStep, choice: Choice, life: int) -> StepResult:
        result = pending_step()
        outline, verdict = self._mirror.commit(result)
        if self._controller is not None:
            timings = result.timings
            if result.drafter_fault is not None:
                choice, timings = Choice(), replace(timings, propose_s=0.0)
            self._controller.observe(outline, verdict, timings, choice)
        if self._is_up:
            self._results.append(essence(result))
        if result.drafter_fault is not None and life == self._life:
            self._life += 1
            self._is_up = False
            self._drafter.restart()
        return result
