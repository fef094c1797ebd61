"""Every sampling parameter acts on every row under that row's own history, and costs the other rows nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.logits_processor import LogitsRows
from app.engine.plan import AdmittedSequence
from app.engine.sampling_params import SamplingParams
from app.engine.truncation import truncate, truncate_by_sorting
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


TRUNCATE = pytest.mark.parametrize("cut", [truncate, truncate_by_sorting])


def kept_by(cut, logits: torch.Tensor, top_k=0, top_p=1.0) -> list[list[int]]:
    """Ids that are left of each row; what is left is as it was."""
    logits = logits - logits.amax(-1, keepdim=True)
    before = logits.clone()
    cut(logits, np.full(len(logits), top_k), np.full(len(logits), top_p))
    kept = logits > -torch.inf
    assert torch.equal(logits[kept], before[kept])
    return [torch.nonzero(row)[:, 0].tolist() for row in kept]


@TRUNCATE
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6])
def test_top_k_keeps_exactly_so_many_and_the_lowest_ids_of_a_tie(top_k, cut):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = kept_by(cut, logits, top_k=top_k)
    assert kept == [sorted([1, 2, 3, 4, 0, 5][:top_k]), list(range(top_k))]


@TRUNCATE
def test_what_earlier_masks_have_taken_does_not_come_back(cut):
    logits = torch.full((1, 6000), -torch.inf)
    logits[0, [7, 4100, 5999]] = torch.tensor([1.0, 3.0, 2.0])
    assert kept_by(cut, logits, top_k=5) == [[7, 4100, 5999]]
    assert kept_by(cut, logits, top_p=1 - 1e-12) == [[7, 4100, 5999]]
    assert kept_by(cut, logits, top_k=5, top_p=0.7) == [[4100, 5999]]
    assert kept_by(cut, logits, top_k=1, top_p=0.7) == [[4100]]


@TRUNCATE
@pytest.mark.parametrize("vocab_size", [7, 257, 5000, 9001])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1 - 1e-12])
def test_a_nucleus_is_the_fewest_tokens_that_reach_top_p(vocab_size, top_p, cut):
    """Also where it is wider than what is looked at first, beside rows where it is not."""
    scale = torch.tensor([0.01, 1.0, 10.0])[:, None]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    probs = logits.double().softmax(-1)
    for row, token_ids in enumerate(kept_by(cut, logits, top_p=top_p)):
        kept = torch.zeros(vocab_size, dtype=torch.bool)
        kept[token_ids] = True
        assert kept.any()
        assert probs[row, kept].sum() >= top_p - 1e-6
        assert probs[row, kept].sum() - probs[row, kept].min() < top_p + 1e-6
        if not kept.all():
            assert probs[row, ~kept].max() <= probs[row, kept].min()


@TRUNCATE
@pytest.mark.parametrize("top_k", [40, 600, 8000])
def test_the_nucleus_is_that_of_the_top_k(top_k, cut):
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(3)) * 2
    for row, token_ids in enumerate(kept_by(cut, logits, top_k=top_k, top_p=0.8)):
        descending, order = logits[row].double().sort(descending=True)
        cumulative = descending[:top_k].softmax(-1).cumsum(-1)
        num_kept = int((cumulative < 0.8).sum()) + 1
        assert token_ids == sorted(order[:num_kept].tolist())


@TRUNCATE
def test_a_nucleus_of_equal_tokens_holds_the_lowest_ids(cut):
    assert kept_by(cut, torch.zeros(1, 5000), top_p=0.4999) == [list(range(2500))]


@TRUNCATE
def test_truncation_may_differ_from_row_to_row_and_leaves_rows_without_numbers_alone(cut):
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(4))
    logits -= logits.amax(-1, keepdim=True)
    logits[3] = torch.nan
    before = logits.clone()
    cut(logits, np.array([3, 0, 0, 5, 5000]), np.array([1.0, 1.0, 0.5, 0.5, 1.0]))
    assert (logits[0] > -torch.inf).sum() == 3
    assert torch.equal(logits[[1, 4]], before[[1, 4]])
    assert 0 < (logits[2] > -torch.inf).sum() < 5000
    assert logits[3].isnan().any()
