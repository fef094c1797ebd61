"""The controller on scripted costs and acceptances: best draft length found, changes followed, little ever lost."""

import numpy as np
import pytest

from app.engine.plan import StepTimings
from app.speculative.controller import calibrate
from app.speculative.cost_model import CostModel
from app.speculative.draft_choice import choose_draft_lengths
from app.speculative.proposer import Verdict
from tests.helpers.scripted_machine import MAX_K, Machine, OutlinedBatch, calibrated


def memory_bound(rows: int) -> float:
    """10 ms whatever the rows, then 1 ms a row: a small model on a laptop."""
    return 0.010 + 0.001 * max(rows - 8, 0)


def compute_bound(rows: int) -> float:
    return 0.002 + 0.002 * rows


def expected_rate(machine: Machine, k: int) -> float:
    """Tokens per second of a fixed draft length, exactly."""
    tokens = machine.num_seqs * (1 + np.cumprod(machine.acceptance)[:k].sum())
    seconds = machine.target(machine.num_seqs * (1 + k))
    if machine.drafter is not None:
        seconds += k * machine.drafter(machine.num_seqs)
    return tokens / seconds


MACHINES = {
    "one stream, good draft model": (memory_bound, lambda rows: 0.002, 0.8, 1, False),
    "one stream, bad draft model": (memory_bound, lambda rows: 0.006, 0.3, 1, False),
    "eight streams, good draft model": (memory_bound, lambda rows: 0.002, 0.8, 8, False),
    "compute-bound, fair draft model": (compute_bound, lambda rows: 0.001, 0.6, 4, False),
    "lookup, one stream": (memory_bound, None, 0.7, 1, True),
    "lookup, compute-bound": (compute_bound, None, 0.5, 8, True),
    "lookup, hopeless": (compute_bound, None, 0.05, 8, True),
    "blind lookup, one stream": (memory_bound, None, 0.7, 1, False),
    "blind lookup, eight streams": (memory_bound, None, 0.3, 8, False),
    "blind lookup, compute-bound": (compute_bound, None, 0.5, 8, False),
    "random drafts, one stream": (memory_bound, None, 0.0, 1, False),
    "random drafts, compute-bound": (compute_bound, None, 0.0, 8, False),
}


def machine(name: str, seed: int = 0) -> Machine:
    target, drafter, acceptance, num_seqs, states = MACHINES[name]
    return Machine(target, drafter, np.full(MAX_K, acceptance), num_seqs, states, seed=seed)


@pytest.mark.parametrize("name", MACHINES)
def test_it_converges_to_the_best_fixed_length(name):
    scripted = machine(name)
    controller = scripted.controller()
    scripted.run(200, controller)
    num_steps = 3000
    rate = scripted.run(num_steps, controller)
    best = max(range(MAX_K + 1), key=lambda k: expected_rate(scripted, k))
    fixed = machine(name, seed=0)
    fixed.run(200, fixed_k=best)
    # The same draws for both, so that chance does not blur one per cent.
    assert rate >= 0.99 * fixed.run(num_steps, fixed_k=best)


@pytest.mark.parametrize("name", MACHINES)
def test_it_never_sits_more_than_two_per_cent_below_plain_decoding(name):
    scripted = machine(name)
    controller = scripted.controller()
    scripted.run(100, controller)
    assert scripted.run(1000, controller) >= 0.98 * expected_rate(scripted, 0)


@pytest.mark.parametrize("name", MACHINES)
def test_a_fresh_servers_first_answer_costs_no_more(name):
    """Of 128 steps from the start on, explorations and first drafts included."""
    rates = [scripted.run(128, scripted.controller()) for scripted in (machine(name, seed) for seed in range(8))]
    assert np.mean(rates) >= 0.975 * expected_rate(machine(name), 0)


@pytest.mark.parametrize("acceptance", [0.1, 0.4])
@pytest.mark.parametrize("num_seqs", [1, 8, 32])
def test_lookup_that_finds_something_now_and_then_does_not_lose(num_seqs, acceptance):
    """N-gram lookup is told to draft before a match is known of; where there is none, nothing is paid."""
    scripted = Machine(compute_bound, None, np.full(MAX_K, acceptance), num_seqs, False, found=0.3)
    controller = scripted.controller()
    scripted.run(100, controller)
    assert scripted.run(1000, controller) >= 0.98 * expected_rate(scripted, 0)


def test_a_losing_draft_model_is_off_within_a_second():
    scripted = machine("one stream, bad draft model")
    controller = scripted.controller()
    while scripted.seconds < 1.0:
        scripted.run(1, controller)
    drafted = controller.totals.num_decisions - controller.totals.num_plain
    scripted.run(300, controller)
    assert controller.totals.num_decisions - controller.totals.num_plain <= drafted + 3
    assert controller.totals.num_explorations > 0, "it must go on looking for drafts that begin to pay"


CHANGES = [(0.1, 0.85), (0.85, 0.1)]


def rate_after_a_change(name: str, change: tuple[float, float], num_steps: int) -> float:
    """Of the best fixed length's, from 50 steps after it on; the mean of many runs, for in few steps chance decides."""
    before, after = change
    rates = []
    for seed in range(12):
        scripted = machine(name, seed)
        controller = scripted.controller()
        scripted.acceptance = np.full(MAX_K, before)
        scripted.run(400, controller)
        scripted.acceptance = np.full(MAX_K, after)
        scripted.run(50, controller)
        best = max(expected_rate(scripted, k) for k in range(MAX_K + 1))
        rates.append(scripted.run(num_steps, controller) / best)
    return float(np.mean(rates))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [name for name in MACHINES if "one stream, good draft model" not in name])
def test_it_has_followed_a_change_of_text_after_50_steps(name, change):
    assert rate_after_a_change(name, change, num_steps=50) >= 0.92


@pytest.mark.parametrize("change", CHANGES)
def test_one_stream_follows_by_the_few_drafts_that_it_sees(change):
    """One verdict a step, and where drafting is off one exploration in many: it takes up to 150 steps."""
    assert rate_after_a_change("one stream, good draft model", change, num_steps=400) >= 0.93


def test_a_cost_model_follows_the_machine():
    model = calibrated(memory_bound)
    for _ in range(200):
        for rows in (1, 8, 16, 40):
            model.observe(rows, 2 * memory_bound(rows))
    for rows in (1, 8, 16, 40):
        assert float(model.seconds(rows)) == pytest.approx(2 * memory_bound(rows), rel=0.1)


def test_rows_that_a_drafter_makes_up_for_are_no_part_of_a_drafts_cost():
    """After a prompt, and after steps without drafts, the first pass has many rows; what is cheaper still counts."""
    scripted = machine("one stream, good draft model")
    controller = scripted.controller()
    scripted.run(50, controller)
    learned = float(controller._draft_cost.seconds(1))

    def step(num_prompt_rows: int, num_drafts: int, propose_s: float) -> float:
        controller.choice.depth = num_drafts
        batch = OutlinedBatch(np.array([0]), np.array([num_drafts]), 1 + num_prompt_rows + num_drafts)
        verdict = Verdict(np.zeros((1, MAX_K + 1)), np.array([1]), np.array([0]), np.zeros(1, bool))
        controller.observe(batch, verdict, StepTimings(propose_s=propose_s, forward_s=0.01))
        return float(controller._draft_cost.seconds(1))

    for rows, drafts in ((500, 1), (0, 0)):
        step(rows, drafts, drafts * learned)
        assert step(0, 1, 1.9 * learned) == pytest.approx(learned)
    step(0, 0, 0.0)
    assert step(0, 1, 0.5 * learned) < 0.99 * learned
    before = step(0, 1, learned)
    assert step(0, 1, 1.5 * before) > before, "rows of a step of drafts are a draft's cost"


def test_a_drafter_that_starts_anew_has_all_tokens_to_see_again():
    """What catching up costs is part of the price of its first drafts: at four thousand tokens these wait."""
    good, prompt = np.full(MAX_K, 0.8), 4000
    scripted = Machine(memory_bound, lambda rows: 0.002 + 0.0005 * rows, good, 1, has_context=True)
    controller = scripted.controller()
    scripted.run(100, controller)
    assert controller.choice.drafts_pay
    scripted.state.token_ids[0, 1 : prompt + 1] = 5
    scripted.state.num_tokens[0] += prompt
    scripted.state.num_computed_tokens[0] += prompt
    controller._num_seen[0] += prompt  # it has seen them
    scripted.run(1, controller)
    assert controller.choice.drafts_pay
    controller.drafter_starts_anew()
    scripted.run(1, controller)
    assert not controller.choice.drafts_pay


def test_one_hiccup_does_not_change_what_is_believed():
    model = calibrated(memory_bound)
    model.observe(8, 10.0)
    assert float(model.seconds(8)) < 1.1 * memory_bound(8)


def test_costs_never_fall_with_rows():
    rng = np.random.default_rng(0)
    model = CostModel([1, 8, 64], [0.01, 0.02, 0.05])
    for _ in range(500):
        model.observe(int(rng.integers(1, 300)), float(rng.random() * 0.1))
    assert (np.diff(model.seconds(np.arange(1, 400))) >= -1e-12).all()


def test_calibration_takes_the_fastest_repeat():
    seconds = iter([0.3, 0.1, 0.2, 0.9, 0.4, 0.5])
    model = calibrate(lambda num_rows: next(seconds), [1, 4])
    assert float(model.seconds(1)) == pytest.approx(0.1)
    assert float(model.seconds(4)) == pytest.approx(0.4)


def test_drafts_go_where_they_are_kept():
    """One sequence repeats itself, the other does not: on a compute-bound machine only the first drafts."""
    acceptance = np.array([[0.95] * 4, [0.2] * 4])
    decision = choose_draft_lengths(acceptance, np.array([4, 4]), 0, calibrated(compute_bound), None)
    assert decision.num_tokens[0] == 4
    assert decision.num_tokens[1] == 0
    assert decision.predicted_rate > decision.plain_rate


def test_rows_that_a_drafter_runs_later_count_against_plain_decoding():
    """MTP keeps its KV whole: a step without drafts saves its passes, but not its rows, which come in a later one."""
    acceptance, limits = np.full((4, 3), 0.5), np.full(4, 3)
    drafter = calibrated(lambda rows: 0.004 + 0.0005 * rows)
    free_to_lag = choose_draft_lengths(acceptance, limits, 0, calibrated(memory_bound), drafter)
    keeps_up = choose_draft_lengths(acceptance, limits, 0, calibrated(memory_bound), drafter, num_followed=4)
    assert free_to_lag.num_tokens.tolist() == [0] * 4
    assert keeps_up.num_tokens.tolist() == [1] * 4
    assert free_to_lag.plain_rate == keeps_up.plain_rate == pytest.approx(4 / 0.010)
    without = choose_draft_lengths(acceptance, 0 * limits, 0, calibrated(memory_bound), drafter, num_followed=4)
    assert without.predicted_rate == pytest.approx(4 / 0.012)
    given_up = choose_draft_lengths(acceptance, 0 * limits, 0, calibrated(memory_bound), drafter)
    assert given_up.predicted_rate == given_up.plain_rate


def test_rows_of_a_prompt_chunk_make_drafts_dearer():
    """Eight rows are free on this machine while nothing else runs; beside a chunk every row costs."""
    acceptance, limits = np.full((1, 4), 0.08), np.array([4])
    alone = choose_draft_lengths(acceptance, limits, 0, calibrated(memory_bound), None)
    beside = choose_draft_lengths(acceptance, limits, 100, calibrated(memory_bound), None)
    assert alone.num_tokens[0] > 0
    assert beside.num_tokens[0] == 0


def test_what_lookups_promise_is_set_beside_what_they_bring():
    """Every sequence is planned drafts for, and one in ten has some: most of the gain that is promised never comes."""
    scripted = Machine(lambda rows: 0.024 + 0.0002 * rows, None, np.full(MAX_K, 0.5), 32, False, found=0.1)
    controller = scripted.controller()
    scripted.run(300, controller)
    assert controller.totals.predicted_gain > 1.05
    assert controller._trust < 0.95


def test_a_calibration_that_was_too_hopeful_is_not_held_against_drafts():
    """A drafter that takes twice as long as its pass alone: its cost is learned first, then what it earns is judged."""
    scripted = Machine(memory_bound, lambda rows: 0.001, np.full(MAX_K, 0.8), 1, False)
    controller = scripted.controller()
    scripted.drafter = lambda rows: 0.002
    scripted.run(100, controller)
    assert controller._trust > 0.95
    assert controller.choice.drafts_pay


def test_drafts_that_say_too_much_of_themselves_are_judged_by_what_they_bring():
    """They are chosen after they are made, and judged where any were chosen."""
    scripted = Machine(lambda rows: 0.02 + 0.002 * rows, None, np.full(MAX_K, 0.7), 8, True, overstated=0.3)
    controller = scripted.controller()
    scripted.run(30, controller)
    assert controller._trust < 0.9
