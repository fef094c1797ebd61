"""Logprobs are those of the unprocessed logits, with rank and the likeliest beside them."""

import numpy as np
import pytest
import torch

from app.engine.logprobs import token_logprobs

LOGITS = torch.randn(100, 37, generator=torch.Generator().manual_seed(0)) * 3
TOKENS = np.random.default_rng(0).integers(0, 37, 100)


@pytest.mark.parametrize("num_top", [0, 1, 5, 37, 99])
def test_logprob_rank_and_top_of_every_row(num_top):
    """More rows than are computed at once, more alternatives than there are tokens."""
    expected = LOGITS.double().log_softmax(-1)
    entries = token_logprobs(LOGITS, TOKENS, num_top)
    assert len(entries) == 100
    for row, entry in enumerate(entries):
        assert entry.token_id == TOKENS[row]
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-5)
        assert entry.rank == 1 + (LOGITS[row] > LOGITS[row, entry.token_id]).sum()
        assert [token for token, _ in entry.top] == LOGITS[row].argsort(descending=True)[:num_top].tolist()
        for token, logprob in entry.top:
            assert logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        if entry.rank <= num_top:
            assert entry.top[entry.rank - 1] == (entry.token_id, entry.logprob)


def test_ties_share_the_better_rank_and_list_the_lower_id_first():
    (entry,) = token_logprobs(torch.tensor([[1.0, 3.0, 0.0, 3.0]]), np.array([3]), 3)
    assert entry.rank == 1
    assert [token for token, _ in entry.top] == [1, 3, 0]


def test_a_row_that_rules_tokens_out_has_logprobs_of_minus_infinity():
    (entry,) = token_logprobs(torch.tensor([[0.0, -torch.inf]]), np.array([1]), 2)
    assert entry.logprob == -np.inf
    assert entry.rank == 2
    assert entry.top == [(0, 0.0), (1, -np.inf)]


def test_no_rows_no_logprobs():
    assert token_logprobs(torch.zeros(0, 9), np.zeros(0, dtype=np.int64), 2) == []


def test_half_precision_logits_are_judged_in_fp32():
    (entry,) = token_logprobs(LOGITS[:1].bfloat16(), TOKENS[:1], 0)
    assert entry.logprob == pytest.approx(LOGITS[0].bfloat16().float().log_softmax(-1)[TOKENS[0]].item(), abs=1e-5)
