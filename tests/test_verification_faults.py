"""Field faults of verification on rows of scripted logits: parameters that miss rows, NaN, empty drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.batch import build_batch
from app.engine.sampling_params import SamplingParams
from app.speculative.proposer import Drafts
from tests.helpers.verification import CPU, Bench, as_drafts

SAMPLED = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


def decode_greedily(params: SamplingParams, row: list[float], draft: list[int], num_tokens: int) -> list[int]:
    bench = Bench([params], [[2]])
    while bench.state.num_tokens[0] < 1 + num_tokens:
        bench.step(as_drafts([draft]), lambda last: torch.tensor(row).expand(len(last), len(row)))
    return bench.outputs()[0][:num_tokens]


@pytest.mark.parametrize("draft", [[], [0], [0, 0, 0, 0], [0, 1, 0, 1]])
def test_penalties_count_the_drafts_before_a_row(draft):
    """A07: constant logits A = 1, B = 0 under a frequency penalty of 2 alternate, drafts or none."""
    params = replace(GREEDY, frequency_penalty=2.0)
    assert decode_greedily(params, [1.0, 0.0, -9.0], draft, 8) == [0, 1] * 4
    assert decode_greedily(replace(GREEDY, frequency_penalty=-2.0), [1.0, 0.0, -9.0], draft, 8) == [0] * 8


def test_the_repetition_penalty_sees_the_prompt():
    params = replace(GREEDY, repetition_penalty=3.0)
    assert decode_greedily(params, [0.5, 0.4, 1.0], [2, 2], 1) == [0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=5)])
def test_logit_bias_reaches_every_row(params):
    """A09: a banned token never appears, a forced one always."""
    row = [5.0, 0.0, 1.0]
    assert 0 not in decode_greedily(replace(params, logit_bias={0: -100.0}), row, [0, 0, 0], 30)
    assert decode_greedily(replace(params, logit_bias={1: 100.0}), row, [0, 0, 0], 30) == [1] * 30


@pytest.mark.parametrize("seed", [None, 11])
def test_min_p_reaches_every_row(seed):
    """A09: of (.5, .3, .2) a min_p of .9 leaves token 0."""
    row = np.log([0.5, 0.3, 0.2]).tolist()
    assert decode_greedily(SamplingParams(min_p=0.9, seed=seed), row, [1, 0, 2], 30) == [0] * 30


@pytest.mark.parametrize("stop", [1, 2])
def test_min_tokens_masks_each_row_by_its_output_index(stop):
    """B05: the arg-max is a stop token at every position; the drafter proposes it too."""
    row = [1.0, 0.0, 0.0]
    row[stop] = 9.0
    for draft in ([], [stop, stop, stop, stop], [0, stop, 0, 0], [0, 0, 0, 0]):
        bench = Bench([replace(GREEDY, min_tokens=6)], [[0, stop]], stop_token_ids=(1, 2))
        while bench.state.num_tokens[0] < 2 + 7:
            bench.step(as_drafts([draft]), lambda last: torch.tensor(row).expand(len(last), 3))
        assert bench.outputs()[0][:7] == [0] * 6 + [stop]


def test_bad_words_end_with_the_drafts_before_a_row():
    params = replace(GREEDY, bad_words_token_ids=[[0, 0, 0], [1]])
    for draft in ([], [0, 0, 0], [0, 0, 2, 0]):
        assert decode_greedily(params, [3.0, 2.0, 1.0], draft, 6) == [0, 0, 2] * 2


def test_greedy_rows_in_a_mixed_batch_are_arg_max():
    """A13: no division by a temperature of 0 or 1e-7, no overflow, ties to the lowest id; alone as in company."""
    tie = [0.0, 3e4, 3e4, -torch.inf]
    rows = [tie, [-3e4, 3e4, 2.9e4, -torch.inf], [3e4, 1e4, -torch.inf, 0.0], [0.0, 3e4, 3e4, 3e4]]
    params = [SamplingParams(temperature=t) for t in (0.0, 1e-7, 1e-3, 1.0)]
    logits = torch.tensor(rows).repeat_interleave(2, dim=0)
    bench = Bench(params, [[1]] * 4)
    verdict = bench.verify(as_drafts([[1], [1], [0], [3]]), logits)
    assert not verdict.failed.any()
    assert verdict.emitted_token_ids[:3].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert verdict.emitted_token_ids[3, 0] in (1, 2, 3)
    for i in range(3):
        alone = Bench(params[i : i + 1], [[1]]).verify(as_drafts([[1]]), torch.tensor([rows[i], rows[i]]))
        assert alone.emitted_token_ids[0, 0] == verdict.emitted_token_ids[i, 0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=3), SamplingParams(top_p=0.9, top_k=5)])
@pytest.mark.parametrize("poison", ["all nan", "one nan", "all -inf", "+inf"])
def test_unusable_logits_fail_their_sequence_alone(params, poison):
    """D04: a vocabulary of 300, poison in row 2 of one sequence of three."""
    vocab_size = 300
    token = 7  # so likely that every mode accepts it
    clean = torch.zeros(vocab_size)
    clean[token] = 1e3
    logits = clean.repeat(12, 1)
    poisoned = {"all nan": torch.nan, "all -inf": -torch.inf}.get(poison)
    if poisoned is not None:
        logits[6] = poisoned
    else:
        logits[6, 299] = torch.nan if poison == "one nan" else torch.inf
    drafts = as_drafts([[token] * 3] * 3)
    verdict = Bench([params] * 3, [[1]] * 3).verify(drafts, logits)
    assert verdict.failed.tolist() == [False, True, False]
    assert verdict.num_emitted.tolist() == [4, 0, 4]
    assert verdict.num_accepted.tolist() == [3, 0, 3]
    assert (verdict.emitted_token_ids[[0, 2]] == token).all()

    logits[4] = -1e3  # row 0 of that sequence now rejects its draft, and the poison behind it decides nothing
    logits[4, 9] = 1e3
    verdict = Bench([params] * 3, [[1]] * 3).verify(drafts, logits)
    assert not verdict.failed.any()
    assert verdict.emitted_token_ids[1, 0] == 9
    assert verdict.num_emitted[1] == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=3)])
def test_a_draft_is_not_accepted_by_the_very_entry_that_is_not_a_number(params, value):
    """D04: the arg-max of a poisoned row is the poison, and here the draft as well."""
    logits = torch.zeros(3, 9)
    logits[0, 4] = value
    logits[1:, 4] = 1e3
    verdict = Bench([params], [[1]]).verify(as_drafts([[4, 4]]), logits)
    assert verdict.failed.tolist() == [True]
    assert verdict.num_emitted.tolist() == verdict.num_accepted.tolist() == [0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=3), replace(SAMPLED, top_p=0.5)])
def test_a_request_that_rules_out_every_token_fails(params):
    """D04: no silent token 0 where nothing is left to say; the neighbour goes on."""
    banned = replace(params, bad_words_token_ids=[[token] for token in range(5)])
    verdict = Bench([banned, params], [[1]] * 2).verify(as_drafts([[2], []]), torch.eye(5)[[3, 3, 3]] * 1e3)
    assert verdict.failed.tolist() == [True, False]
    assert verdict.num_emitted.tolist() == [0, 1]
    assert verdict.emitted_token_ids[1, 0] == 3


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=3)])
def test_sequences_without_drafts_take_a_plain_step_beside_the_others(params):
    """D15: ragged drafts, none at all, and sequences in the midst of their prompt."""
    token = torch.zeros(4, 6)
    token[torch.arange(4), torch.tensor([1, 2, 3, 4])] = 1e3
    cases: list[list[list[int]]] = [[[], [2, 3], []], [[], [], []], [[1], [], [5, 5, 5]]]
    for draft_lists in cases:
        bench = Bench([params] * 3, [[1]] * 3)
        logits = torch.cat([token[: 1 + len(row)] for row in draft_lists])
        verdict = bench.verify(as_drafts(draft_lists), logits)
        plain = [1, 2, 3, 4]
        for i, row in enumerate(draft_lists):
            num_accepted = next((j for j, draft in enumerate(row) if draft != plain[j]), len(row))
            assert verdict.num_accepted[i] == num_accepted
            assert verdict.emitted_token_ids[i, : verdict.num_emitted[i]].tolist() == plain[: num_accepted + 1]


def test_a_batch_of_prompt_chunks_says_nothing():
    bench = Bench([SAMPLED] * 2, [[1, 2, 3]] * 2)
    bench.state.num_computed_tokens[:] = 0
    drafts = Drafts.none(2)
    no, two = np.zeros(2, dtype=bool), np.full(2, 2)
    batch = build_batch(
        bench.state, bench.slots, np.zeros(2, np.int64), two, drafts.token_ids, drafts.num_tokens, no, CPU
    )
    verdict = bench.verifier.verify(torch.zeros(0, 5), batch, drafts)
    assert verdict.num_emitted.tolist() == verdict.num_accepted.tolist() == [0, 0]
    assert not verdict.failed.any()


def test_a_draft_outside_the_vocabulary_is_an_assertion_not_a_token():
    with pytest.raises(AssertionError, match="no token of the target"):
        Bench([GREEDY], [[1]]).verify(as_drafts([[5]]), torch.zeros(2, 5))


def test_unseeded_sequences_have_streams_of_their_own():
    """A11: uniform over 100 tokens; sixteen sequences that differ in the seed drawn at admission alone."""
    seeds = np.random.default_rng(1).integers(0, 2**63, 16).tolist()
    texts = []
    for seed in seeds:
        bench = Bench([SAMPLED], [[1]], seeds=[seed])
        for _ in range(20):
            bench.step(Drafts.none(1), lambda last: torch.zeros(len(last), 100))
        texts.append(tuple(bench.outputs()[0]))
    assert len(set(texts)) == 16
