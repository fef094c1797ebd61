"""The controller by a clock that lies: jitter, spikes, a machine that drifts; short requests one after another."""

import numpy as np
import pytest

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan, StepTimings
from app.engine.sampling_params import SamplingParams
from app.speculative.cost_model import CostModel
from app.speculative.exploration import ExplorationBudget
from app.speculative.followed_sequences import FollowedSequences
from app.speculative.prediction_record import PredictionRecord
from app.speculative.proposer import Verdict
from tests.helpers.scripted_machine import MAX_K, Machine, Noise, OutlinedBatch, calibrated

BUSY = Noise(jitter=0.15, spikes=0.03, drift=0.3)
REQUEST_LENGTH = 96
MTP_ACCEPTANCE = np.array([0.78, 0.6, 0.48] + [0.0] * (MAX_K - 3))


def two_cores(rows: int) -> float:
    """Bound by its weights to eight rows, by arithmetic above."""
    return 0.006 + 0.0002 * min(rows - 1, 7) + 0.0006 * max(rows - 8, 0)


def six_layers(rows: int) -> float:
    return 0.3 * two_cores(rows)


def one_module(rows: int) -> float:
    return 0.06 * two_cores(rows) + 0.00005 * rows


FOLLOWING = {"keeps_up": True, "num_prompt_tokens": 64}
READING = {"has_context": True, "num_prompt_tokens": 64}
STATING = {"states_acceptance": True, "found": 0.4}
CASES = {
    "random drafts": (None, np.full(MAX_K, 2e-5), {}),
    "n-gram, open text": (None, np.full(MAX_K, 0.2), {"found": 0.3}),
    "n-gram, copied text": (None, np.full(MAX_K, 0.9), {"found": 0.9}),
    "six layers, fair": (six_layers, np.full(MAX_K, 0.25), READING),
    "six layers, hopeless": (six_layers, np.full(MAX_K, 0.02), READING),
    "good draft model": (lambda rows: 0.1 * two_cores(rows), np.full(MAX_K, 0.75), READING),
    "suffix, too sure": (None, np.full(MAX_K, 0.1), {**STATING, "overstated": 0.15}),
    "suffix, too sure of what is even": (None, np.full(MAX_K, 0.4), {**STATING, "overstated": 0.15}),
    "suffix, too modest": (None, np.full(MAX_K, 0.5), {**STATING, "overstated": -0.15}),
    "mtp": (one_module, MTP_ACCEPTANCE, FOLLOWING),
    "mtp, dear": (lambda rows: 3 * one_module(rows), MTP_ACCEPTANCE, FOLLOWING),
}


def busy_machine(name: str, num_seqs: int, noise: Noise = BUSY) -> Machine:
    drafter, acceptance, fields = CASES[name]
    return Machine(
        two_cores, drafter, acceptance, num_seqs, noise=noise, request_length=REQUEST_LENGTH, seed=num_seqs, **fields
    )


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
@pytest.mark.parametrize("name", CASES)
def test_it_never_sits_more_than_two_per_cent_below_plain_decoding(name, num_seqs):
    machine = busy_machine(name, num_seqs)
    controller = machine.controller()
    assert machine.run_against_plain(250, controller) >= 0.91, "little is lost until it knows"
    assert machine.run_against_plain(750, controller) >= 0.98


@pytest.mark.parametrize("slope", [0.7, 1.4])
@pytest.mark.parametrize("num_seqs", [1, 8, 32])
@pytest.mark.parametrize("name", ["random drafts", "good draft model", "n-gram, copied text", "mtp"])
def test_it_finds_out_where_its_calibration_was_wrong(name, num_seqs, slope):
    """What rows cost beside the first was measured on an idle machine, or on a busy one."""
    machine = busy_machine(name, num_seqs)
    controller = machine.controller(wrong=slope)
    machine.run(250, controller)
    assert machine.run_against_plain(750, controller) >= 0.97


@pytest.mark.parametrize(("name", "gain"), [("n-gram, copied text", 4.0), ("good draft model", 1.85), ("mtp", 1.75)])
def test_what_pays_goes_on_paying(name, gain):
    machine = busy_machine(name, 1)
    controller = machine.controller()
    machine.run(100, controller)
    assert machine.run_against_plain(600, controller) >= gain


def test_costs_beside_one_another_outlive_a_drift():
    """Only steps of one row are seen while the machine gets slower: what more rows cost follows."""
    rng = np.random.default_rng(0)
    model = calibrated(two_cores)
    for _ in range(300):
        model.observe(1, 1.5 * two_cores(1) * float(np.exp(0.15 * rng.standard_normal())))
    for rows in (4, 16, 64):
        assert float(model.seconds(rows) / model.seconds(1)) == pytest.approx(two_cores(rows) / two_cores(1), rel=0.1)
    assert float(model.seconds(64)) == pytest.approx(1.5 * two_cores(64), rel=0.15)


def test_prompt_rows_say_nothing_of_what_drafts_cost():
    machine = busy_machine("random drafts", 1)
    controller = machine.controller()
    machine.run(20, controller)
    before, gain = controller._pass_cost.seconds(np.arange(1, 600)), controller.totals.plain_tokens
    verdict = Verdict(np.zeros((1, MAX_K + 1)), np.array([1]), np.array([0]), np.zeros(1, bool))
    controller.observe(OutlinedBatch(np.array([0]), np.array([0]), 500), verdict, StepTimings(forward_s=9.0))
    assert (controller._pass_cost.seconds(np.arange(1, 600)) == before).all()
    assert controller.totals.plain_tokens == gain, "a prompt's time is no loss of the drafts'"


def test_a_drafter_that_does_not_pay_is_not_run():
    """At 32 sequences the modules are given up: what they cost still is a share of the time set aside."""
    machine = busy_machine("mtp, dear", 32)
    controller = machine.controller()
    machine.run(300, controller)
    assert controller.totals.num_plain > 250
    assert machine.followed.sum() <= 4
    spent, seconds = controller.totals.exploration_s, controller.totals.total_s
    machine.run(500, controller)
    assert controller.totals.exploration_s - spent <= 0.02 * (controller.totals.total_s - seconds)


def test_new_sequences_are_followed_again_when_drafts_begin_to_pay():
    machine = busy_machine("mtp", 1)
    machine.acceptance = np.zeros(MAX_K)
    controller = machine.controller()
    machine.run(500, controller)
    assert controller.totals.num_plain > 350
    machine.acceptance = MTP_ACCEPTANCE
    machine.run(3000, controller)
    assert machine.run_against_plain(300, controller) >= 1.6


def test_who_does_not_fit_the_budget_is_given_up_at_once():
    drafter = calibrated(one_module)
    budget = ExplorationBudget(calibrated(two_cores), drafter)
    followed = FollowedSequences(4, drafter, budget)
    followed.expect(0.9)
    admitted = [AdmittedSequence(slot, [5] * 200, 200, 0, [slot], SamplingParams(), 0, ()) for slot in range(4)]
    scheduled = [ScheduledSequence(slot, 200, 0, []) for slot in range(4)]
    plan = StepPlan(0, scheduled, admitted)
    assert followed.give_up(plan) == [1, 2, 3], "20 ms are granted at first, and a prompt takes 17"
    budget.spend(1.0)
    later = StepPlan(1, [ScheduledSequence(slot, 1, 0, []) for slot in range(4)])
    assert followed.give_up(later) == [0]
    assert followed.give_up(later) == []


def test_those_are_explored_whose_drafter_lacks_least():
    budget = ExplorationBudget(calibrated(two_cores), calibrated(six_layers))
    limits, missing = np.array([4, 4, 0, 4]), np.array([900, 1, 1, 700])
    assert budget.draft_lengths(limits, missing, 0).tolist() == [0, 1, 0, 0]
    budget.spend(1.0)
    assert not budget.draft_lengths(limits, missing, 0).any()
    budget.spend(-1.0)
    budget.grant(1000.0)
    assert budget.draft_lengths(limits, missing // 10, 0).tolist() == [2, 2, 0, 2]
    budget.spend(0.1)
    assert budget.draft_lengths(limits, missing, 0).tolist() == [0, 1, 0, 0], "no more is put by"


def test_a_decision_stands_only_while_nothing_changes():
    machine = Machine(two_cores, None, np.zeros(MAX_K), 2)
    controller = machine.controller()
    machine.run(200, controller)
    held = []
    decide = controller._draft_lengths

    def counted(*arguments):
        held.append(controller.choice)
        return decide(*arguments)

    controller._draft_lengths = counted
    machine.run(90, controller)
    assert 10 <= len(held) <= 20
    num_decided = len(held)
    controller._num_held = 5
    machine.state.release(1)
    controller.plan(machine.state, StepPlan(0, [ScheduledSequence(0, 1, MAX_K, [])], released_slots=[1]))
    assert len(held) == num_decided + 1


def test_predictions_are_believed_as_far_as_they_came_true():
    record = PredictionRecord(weight=10.0, decay=0.9)
    assert record.ratio == 1.0
    for _ in range(100):
        record.observe(1.0, 2.0)
    assert record.ratio == pytest.approx((10 + 10) / (10 + 20), abs=0.01)
    for _ in range(100):
        record.observe(0.0, 0.0)
    assert record.ratio == pytest.approx(1.0, abs=0.01)


def test_a_model_of_two_rows_costs_is_a_model():
    model = CostModel([1, 2], [0.01, 0.01])
    for _ in range(50):
        assert model.observe(2, 0.02) > 1.0
    assert float(model.seconds(1)) > 0.015
