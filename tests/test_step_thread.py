"""The thread of a rank that carries plans out, without Ray."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.engine.plan import StepPlan, StepResult, StepTimings
from app.serve.step_thread import StepThread


def plan_number(step_id: int) -> StepPlan:
    return StepPlan(step_id, [])


def test_plans_are_carried_out_in_order_by_one_thread_whoever_brings_them_when() -> None:
    carried_out: list[tuple[int, int]] = []

    def step(plan: StepPlan) -> StepResult:
        carried_out.append((plan.step_id, threading.get_ident()))
        return StepResult(plan.step_id, [], StepTimings(), None)

    steps = StepThread(step)
    with ThreadPoolExecutor(max_workers=4) as bringers:
        brought = [bringers.submit(steps.carry_out, plan_number(step_id)) for step_id in (3, 1, 2)]
        time.sleep(0.1)
        assert not carried_out  # before the first has come
        brought.append(bringers.submit(steps.carry_out, plan_number(0)))
        results = [future.result(timeout=30) for future in brought]
    assert [result and result.step_id for result in results] == [3, 1, 2, 0]
    assert [step_id for step_id, _ in carried_out] == [0, 1, 2, 3]
    assert len({thread for _, thread in carried_out}) == 1


def test_a_failure_is_raised_to_the_one_who_waits_for_that_step_and_the_next_is_carried_out() -> None:
    def step(plan: StepPlan) -> StepResult:
        if plan.step_id == 0:
            raise RuntimeError("out of memory")
        return StepResult(plan.step_id, [], StepTimings(), None)

    steps = StepThread(step)
    with pytest.raises(RuntimeError, match="out of memory"):
        steps.carry_out(plan_number(0))
    result = steps.carry_out(plan_number(1))
    assert result is not None
    assert result.step_id == 1
