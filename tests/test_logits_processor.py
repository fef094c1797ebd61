"""Every sampling parameter acts on every row under that row's own history, and costs the other rows nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.logits_processor import LogitsRows
from app.engine.plan import AdmittedSequence
from app.engine.sampling_params import SamplingParams
from app.engine.truncation import truncate_to_top_k, truncate_to_top_p
from tests.helpers.verification import Bench, reference_probs

VOCAB = 40
STOPS = (6, 2)
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams()


def random_params(rng: np.random.Generator) -> SamplingParams:
    def sometimes(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    def token():
        return int(rng.integers(VOCAB))

    return SamplingParams(
        temperature=sometimes(float(rng.uniform(0.2, 2)), 1.0),
        top_p=sometimes(float(rng.uniform(0.3, 1)), 1.0),
        top_k=sometimes(int(rng.integers(1, 30)), 0),
        min_p=sometimes(float(rng.uniform(0, 0.3)), 0.0),
        presence_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=sometimes(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=sometimes({token(): float(rng.uniform(-5, 5)) for _ in range(3)}, {}),
        bad_words_token_ids=sometimes([[token()], [token(), token()], [3, 3, 4], [3, 5]], []),
        min_tokens=sometimes(int(rng.integers(0, 9)), 0),
    )


def processed_probs(bench: Bench, rows: LogitsRows, logits: torch.Tensor) -> np.ndarray:
    processor = bench.sampler.logits_processor
    processor.table.refresh(bench.slots)
    return processor.process(logits.clone(), rows).double().softmax(-1).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_processing_is_its_definition_on_every_row(seed):
    """Random parameters side by side, ragged outputs and drafts; against the slow reference, row by row."""
    rng = np.random.default_rng(seed)
    num_seqs, k = 40, 4
    params = [random_params(rng) for _ in range(num_seqs)]
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in range(num_seqs)]
    outputs = [rng.integers(2, 7, rng.integers(0, 12)).tolist() for _ in range(num_seqs)]
    bench = Bench(params, prompts, outputs, stop_token_ids=STOPS)
    slots, num_drafts = np.repeat(bench.slots, k + 1), np.tile(np.arange(k + 1), num_seqs)
    order = rng.permutation(len(slots))[:-num_seqs]
    drafts = rng.integers(2, 7, (num_seqs, k))
    rows = LogitsRows(slots[order], drafts[slots[order]], num_drafts[order])
    logits = torch.from_numpy(rng.normal(0, 2, (len(order), VOCAB))).float()

    probs = processed_probs(bench, rows, logits)
    for row, (slot, j) in enumerate(zip(rows.slots, rows.num_drafts, strict=True)):
        output = outputs[slot] + drafts[slot, :j].tolist()
        expected = reference_probs(logits[row].numpy(), prompts[slot], output, params[slot], STOPS)
        np.testing.assert_allclose(probs[row], expected, atol=1e-5, err_msg=f"{params[slot]}, draft row {j}")


def test_rows_that_want_nothing_are_not_touched():
    """Greedy rows without an edit and plain samples are their distribution already; min_tokens only while it holds."""
    params = [
        GREEDY,
        PLAIN,
        replace(GREEDY, top_k=3, top_p=0.5, min_p=0.5),
        replace(PLAIN, min_tokens=3),
        replace(GREEDY, presence_penalty=0.1),
        replace(PLAIN, temperature=0.5),
    ]
    bench = Bench(params, [[1, 2]] * 6, [[5, 5]] * 6, stop_token_ids=STOPS)
    bench.sampler.table.refresh(bench.slots)
    drafts = np.zeros((6, 1), dtype=np.int64)
    for num_drafts, expected in ((0, [0, 0, 0, 1, 1, 1]), (1, [0, 0, 0, 0, 1, 1])):
        rows = LogitsRows(bench.slots, drafts, np.full(6, num_drafts))
        assert bench.sampler.logits_processor.changes(rows).tolist() == [bool(each) for each in expected]


def test_min_tokens_without_stop_tokens_changes_nothing():
    bench = Bench([replace(PLAIN, min_tokens=9)], [[1]])
    bench.sampler.table.refresh(bench.slots)
    rows = LogitsRows(bench.slots, np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64))
    assert not bench.sampler.logits_processor.changes(rows).any()


def test_a_slot_taken_by_another_request_is_read_anew():
    bench = Bench([replace(PLAIN, top_k=1)], [[1]])
    rows = LogitsRows(bench.slots, np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64))
    logits = torch.zeros(1, VOCAB)
    assert (processed_probs(bench, rows, logits) > 0).sum() == 1
    bench.state.release(0)
    bench.state.admit(AdmittedSequence(0, [1], 1, 0, [0], replace(PLAIN, top_k=2), 0, ()))
    assert (processed_probs(bench, rows, logits) > 0).sum() == 2


def test_a_temperature_just_above_greedy_overflows_nothing():
    """A13: logits of 3e38 over 2e-5 are far beyond fp32."""
    bench = Bench([replace(PLAIN, temperature=2e-5, min_p=0.1)], [[1]])
    rows = LogitsRows(bench.slots, np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64))
    logits = torch.tensor([[3e38, -3e38, 1.0, -torch.inf]])
    assert processed_probs(bench, rows, logits).tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6])
def test_top_k_keeps_exactly_so_many_and_the_lowest_ids_of_a_tie(top_k):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    truncate_to_top_k(logits, torch.tensor([top_k, top_k]), top_k)
    kept = [torch.nonzero(row > -torch.inf)[:, 0].tolist() for row in logits]
    assert kept[0] == sorted([1, 2, 3, 4, 0, 5][:top_k])
    assert kept[1] == list(range(top_k))


def test_top_k_may_exceed_what_earlier_masks_have_left():
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    truncate_to_top_k(logits, torch.tensor([3]), 3)
    assert logits.tolist() == [[1.0, -torch.inf, 2.0, -torch.inf]]


@pytest.mark.parametrize("vocab_size", [7, 255, 257, 3000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1 - 1e-12])
def test_a_nucleus_is_the_fewest_tokens_that_reach_top_p(vocab_size, top_p):
    """Also where it is wider than what is looked at first, beside rows where it is not."""
    scale = torch.tensor([0.01, 1.0, 10.0])[:, None]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    probs = logits.double().softmax(-1)
    truncate_to_top_p(logits, torch.full((3,), top_p, dtype=torch.float64))
    for row in range(3):
        kept = logits[row] > -torch.inf
        assert probs[row, kept].sum() >= min(top_p, 1 - 1e-6) - 1e-6
        assert kept.any()
        assert probs[row, kept].sum() - probs[row, kept].min() < top_p + 1e-6
        if not kept.all():
            assert probs[row, ~kept].max() <= probs[row, kept].min()


def test_a_nucleus_of_equal_tokens_holds_the_lowest_ids():
    logits = torch.zeros(1, 1000)
    truncate_to_top_p(logits, torch.tensor([0.4999], dtype=torch.float64))
    assert torch.nonzero(logits[0] > -torch.inf)[:, 0].tolist() == list(range(500))


def test_a_wide_top_k_is_sorted():
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(2))
    expected = logits.argsort(dim=-1, descending=True)[:, :2500].sort(dim=-1).values
    truncate_to_top_k(logits, torch.tensor([2500, 2500]), 2500)
    assert torch.equal(torch.nonzero(logits > -torch.inf)[:, 1].view(2, -1), expected)
