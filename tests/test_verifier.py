"""Verification gives the target's distribution, whatever was drafted; the field faults of acceptance stay away."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.sampling_params import SamplingParams
from app.speculative.proposer import Drafts
from tests.helpers.verification import Bench, as_drafts, chi_square_p, histogram, reference_joint, reference_probs

VOCAB = 5
NUM_SEQS = 2000
NUM_TOKENS = 3
rng = np.random.default_rng(7)
TARGET = rng.normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
DRAFTER = (TARGET + rng.normal(0, 1.5, (VOCAB, VOCAB))).astype(np.float32)
SAMPLED = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)

CASES = {
    "plain": SAMPLED,
    "temperature": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.15),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.4),
    "bias": SamplingParams(logit_bias={1: -1.0, 3: 1.5}, bad_words_token_ids=[[0, 2], [4]]),
    "min_tokens": SamplingParams(min_tokens=2),
    "all": SamplingParams(temperature=0.8, top_p=0.9, top_k=4, min_p=0.02, frequency_penalty=1.0, logit_bias={2: 0.5}),
}
STOPS = (3,)


def logits_from(table: np.ndarray):
    tensor = torch.from_numpy(table)
    return lambda last: tensor[torch.from_numpy(np.asarray(last))]


def probs_to_logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def emit(params, mode, drafter, num_tokens=NUM_TOKENS, num_seqs=NUM_SEQS, k=2) -> np.ndarray:
    """Outputs [num_seqs, num_tokens] of as many sequences that differ in their seed alone."""
    bench = Bench([params] * num_seqs, [[1, 2]] * num_seqs, stop_token_ids=STOPS, mode=mode, max_model_len=16)
    while bench.state.num_tokens.min() < 2 + num_tokens:
        last = bench.state.token_ids[bench.slots, bench.state.num_tokens - 1]
        if drafter == "none":
            drafts = Drafts.none(num_seqs)
        elif drafter == "one-hot":
            first = DRAFTER[last].argmax(-1)
            drafts = as_drafts(np.stack([first, DRAFTER[first].argmax(-1)], axis=1).tolist())
        else:
            drafts = bench.draw_drafts(logits_from(DRAFTER), [k] * num_seqs)
        verdict = bench.step(drafts, logits_from(TARGET))
        assert not verdict.failed.any()
    return np.array([output[:num_tokens] for output in bench.outputs()])


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("drafter", ["none", "one-hot", "soft"])
@pytest.mark.parametrize("case", CASES)
def test_emitted_tokens_follow_the_processed_target(case, drafter, mode):
    """Chi-square over all outputs of three tokens: every position, under its own history."""
    expected = reference_joint(TARGET, [1, 2], NUM_TOKENS, CASES[case], STOPS)
    observed = histogram(emit(CASES[case], mode, drafter), VOCAB)
    assert observed.sum() == NUM_SEQS
    assert chi_square_p(observed, expected) > 1e-4


def test_the_chi_square_sees_a_soft_draft_taken_for_one_hot():
    """The check itself can fail: one-hot drafts judged by a soft distribution are the bias that it must find."""
    num_seqs = NUM_SEQS
    bench = Bench([SAMPLED] * num_seqs, [[1]] * num_seqs, mode="rejection")
    drafts = Drafts(
        np.zeros((num_seqs, 1), dtype=np.int64),
        np.ones(num_seqs, dtype=np.int64),
        torch.tensor([0.6, 0.3, 0.1]).expand(num_seqs, 1, 3),
    )
    verdict = bench.verify(drafts, probs_to_logits([0.5, 0.3, 0.2]).expand(2 * num_seqs, 3))
    observed = np.bincount(verdict.emitted_token_ids[:, 0], minlength=3)
    assert chi_square_p(observed, np.array([0.5, 0.3, 0.2])) < 1e-12


def test_an_arg_max_draft_counts_as_one_hot():
    """A04: the drafter always proposes token 0 of (.5, .3, .2)."""
    num_seqs = 10_000
    bench = Bench([SAMPLED] * num_seqs, [[1]] * num_seqs, mode="rejection")
    verdict = bench.verify(as_drafts([[0]] * num_seqs), probs_to_logits([0.5, 0.3, 0.2]).expand(2 * num_seqs, 3))
    assert abs(verdict.num_accepted.mean() - 0.5) < 0.02
    observed = np.bincount(verdict.emitted_token_ids[:, 0], minlength=3)
    assert chi_square_p(observed, np.array([0.5, 0.3, 0.2])) > 1e-4


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("soft", [False, True])
def test_a_draft_that_the_target_rules_out_never_appears(mode, soft):
    """A03: probability 0 in the target, 1 in the drafter; 200 steps, and what follows the rejection is dropped."""
    num_seqs = 200
    bench = Bench([SAMPLED] * num_seqs, [[1]] * num_seqs, mode=mode)
    probs = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(num_seqs, 3, 4) if soft else None
    verdict = bench.verify(
        as_drafts([[2, 2, 2]] * num_seqs, probs), probs_to_logits([0.5, 0.3, 0.0, 0.2]).expand(4 * num_seqs, 4)
    )
    assert (verdict.num_accepted == 0).all()
    assert (verdict.num_emitted == 1).all()
    assert (verdict.emitted_token_ids[:, 0] != 2).all()


def test_acceptance_per_position_is_the_ratio_of_the_distributions():
    """A03: min(1, target / draft), position by position, over what the drafter really drew."""
    num_seqs = 10_000
    target, draft = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
    bench = Bench([SAMPLED] * num_seqs, [[1]] * num_seqs, mode="rejection")
    drafts = bench.draw_drafts(logits_from(np.log(np.tile(draft, (3, 1))).astype(np.float32)), [2] * num_seqs)
    verdict = bench.verify(drafts, torch.from_numpy(np.log(target)).float().expand(3 * num_seqs, 3))
    overlap = np.minimum(target, draft).sum()
    assert (verdict.num_accepted >= 1).mean() == pytest.approx(overlap, abs=0.02)
    assert (verdict.num_accepted >= 2).mean() == pytest.approx(overlap**2, abs=0.02)
    observed = np.bincount(verdict.emitted_token_ids[:, 0], minlength=3)
    assert chi_square_p(observed, target) > 1e-4


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_top_k_one_rejects_every_other_draft(mode):
    """A06: accepted, recovered and bonus tokens all come from the processed distribution."""
    num_seqs = 300
    bench = Bench([SamplingParams(top_k=1)] * num_seqs, [[1]] * num_seqs, mode=mode)
    verdict = bench.verify(as_drafts([[1]] * num_seqs), probs_to_logits([0.4, 0.3, 0.2, 0.1]).expand(2 * num_seqs, 4))
    assert (verdict.num_emitted == 1).all()
    assert (verdict.emitted_token_ids[:, 0] == 0).all()
    verdict = bench.verify(as_drafts([[0]] * num_seqs), probs_to_logits([0.4, 0.3, 0.2, 0.1]).expand(2 * num_seqs, 4))
    assert (verdict.num_emitted == 2).all()
    assert (verdict.emitted_token_ids[:, :2] == 0).all()


@pytest.mark.parametrize("seeded", [False, True])
def test_equal_distributions_accept_everything(seeded):
    """A perfect drafter loses nothing, in either mode, under any processing."""
    params = replace(CASES["all"], seed=4) if seeded else CASES["all"]
    num_seqs = 500
    bench = Bench([params] * num_seqs, [[1, 2]] * num_seqs)
    drafts = bench.draw_drafts(logits_from(TARGET), [3] * num_seqs)
    verdict = bench.step(drafts, logits_from(TARGET))
    assert (verdict.num_accepted == 3).all()


def test_an_empty_residual_falls_back_to_the_target():
    """Draft probs above the target's everywhere: only rounding can bring that about, and no id may be invented."""
    num_seqs = 400
    bench = Bench([SAMPLED] * num_seqs, [[1]] * num_seqs, mode="rejection")
    probs = torch.tensor([1.0, 1.0, 0.0]).expand(num_seqs, 1, 3)
    drafts = as_drafts([[0]] * num_seqs, probs)
    verdict = bench.verify(drafts, probs_to_logits([0.25, 0.75, 0.0]).expand(2 * num_seqs, 3))
    rejected = verdict.num_accepted == 0
    assert rejected.sum() > 200
    assert set(verdict.emitted_token_ids[rejected, 0].tolist()) == {0, 1}


def test_coupled_acceptance_reaches_its_bound():
    """(1 - TV) / (1 + TV) for drafts drawn with verification's own noise (arXiv 2408.07978)."""
    num_seqs = 10_000
    target, draft = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.35, 0.15])
    bench = Bench([SAMPLED] * num_seqs, [[1]] * num_seqs, mode="coupled")
    drafts = bench.draw_drafts(logits_from(np.log(np.tile(draft, (3, 1))).astype(np.float32)), [1] * num_seqs)
    assert drafts.probs is None
    assert chi_square_p(np.bincount(drafts.token_ids[:, 0], minlength=3), draft) > 1e-4
    verdict = bench.verify(drafts, torch.from_numpy(np.log(target)).float().expand(2 * num_seqs, 3))
    total_variation = np.abs(target - draft).sum() / 2
    rate = verdict.num_accepted.mean()
    assert rate > (1 - total_variation) / (1 + total_variation)
    assert rate < np.minimum(target, draft).sum() + 0.01


def seeded_outputs(drafts_of, seeds: list[int], params=CASES["all"], num_tokens: int = 12) -> list[list[int]]:
    bench = Bench([replace(params, seed=seed) for seed in seeds], [[1, 2]] * len(seeds), stop_token_ids=STOPS)
    step = 0
    while bench.state.num_tokens.min() < 2 + num_tokens:
        bench.step(drafts_of(bench, step), logits_from(TARGET))
        step += 1
    return [output[:num_tokens] for output in bench.outputs()]


def test_a_seed_gives_the_same_ids_with_any_drafts_and_batch_mates():
    """A10, and coupled identity: no drafts, other k, other drafter, steps without drafts, other company."""
    seeds = [7, 8, 9, 2**63 + 1]
    num_seqs = len(seeds)
    plain = seeded_outputs(lambda bench, step: Drafts.none(num_seqs), seeds)
    wild = np.random.default_rng(0)
    drafters = {
        "k=1": lambda bench, step: bench.draw_drafts(logits_from(DRAFTER), [1] * num_seqs),
        "k=4": lambda bench, step: bench.draw_drafts(logits_from(DRAFTER), [4] * num_seqs),
        "perfect": lambda bench, step: bench.draw_drafts(logits_from(TARGET), [3] * num_seqs),
        "wild": lambda bench, step: as_drafts([wild.integers(0, VOCAB, k).tolist() for k in (0, 1, 3, 2)]),
        "now and then": lambda bench, step: (
            Drafts.none(num_seqs) if step % 2 else bench.draw_drafts(logits_from(DRAFTER), [2] * num_seqs)
        ),
    }
    for name, drafts_of in drafters.items():
        assert seeded_outputs(drafts_of, seeds) == plain, name
    for seed, expected in zip(seeds, plain, strict=True):
        assert seeded_outputs(lambda bench, step: Drafts.none(1), [seed]) == [expected]
    company = seeded_outputs(lambda bench, step: Drafts.none(8), [1, 7, 2, 3, 8, 4, 5, 6])
    assert [company[1], company[4]] == plain[:2]
    assert len({tuple(output) for output in plain}) == num_seqs


def test_a_seed_repeats_under_rejection_too_where_drafts_do():
    """A10: a step that was offered no drafts consumes just what a plain step does; batch mates shift nothing."""
    runs = []
    for mates in (0, 7):
        params = [replace(SAMPLED, seed=7)] + [SAMPLED] * mates
        bench = Bench(params, [[1, 2]] * len(params), mode="rejection")
        step = 0
        while bench.state.num_tokens[0] < 14:
            none, some = Drafts.none(len(params)), bench.draw_drafts(logits_from(DRAFTER), [2] * len(params))
            bench.step(none if step % 3 == 1 else some, logits_from(TARGET))
            step += 1
        runs.append(bench.outputs()[0][:12])
    assert runs[0] == runs[1]


def test_modes_stand_side_by_side_in_a_batch():
    """auto: a seeded row is coupled, a greedy row arg-max, an unseeded one rejection sampled from soft drafts."""
    num_each = 1500
    params = [GREEDY] * num_each + [SAMPLED] * num_each + [replace(SAMPLED, seed=s) for s in range(num_each)]
    bench = Bench(params, [[1, 2]] * len(params))
    drafts = bench.draw_drafts(logits_from(DRAFTER), [1] * len(params))
    verdict = bench.step(drafts, logits_from(TARGET))
    first = verdict.emitted_token_ids[:, 0].reshape(3, num_each)
    probs = reference_probs(TARGET[2], [1, 2], [], SAMPLED)
    assert (first[0] == TARGET[2].argmax()).all()
    for row in first[1:]:
        assert chi_square_p(np.bincount(row, minlength=VOCAB), probs) > 1e-4
    coupled = Bench([SAMPLED] * num_each, [[1, 2]] * num_each, mode="coupled").step(
        Drafts.none(num_each), logits_from(TARGET)
    )
    assert (first[2] == coupled.emitted_token_ids[:, 0]).all()


def test_logits_are_left_as_they_are():
    params = [GREEDY, CASES["all"], CASES["penalties"], replace(CASES["bias"], seed=1)]
    bench = Bench(params, [[1, 2]] * 4)
    logits = torch.from_numpy(TARGET[[2, 1] * 4]).clone()
    before = logits.clone()
    bench.verify(as_drafts([[1]] * 4), logits)
    assert torch.equal(logits, before)
