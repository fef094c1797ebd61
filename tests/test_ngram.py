"""Prompt lookup finds what followed the longest suffix, and nothing where nothing did."""

from dataclasses import replace

import numpy as np
import pytest

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.ngram import NgramProposer, look_up


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),  # what followed
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2]),  # the most recent
        ([1, 2, 3, 8, 8, 8, 8, 1, 2, 3, 9, 1, 2, 3], 5, [8, 8, 8, 8, 1]),  # the most recent with so many behind it
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 32, [8, 1, 2, 3, 9, 1, 2, 3]),  # else the one with the most
        ([7, 1, 2, 5, 3, 1, 2, 6, 7, 1, 2], 1, [5]),  # a longer suffix, further back
        ([4, 4, 4, 4, 4, 4], 2, [4, 4]),  # overlapping itself
        ([1, 2, 1, 2, 1, 2, 1], 3, [2, 1, 2]),
        ([1, 2, 3, 4], 3, []),
        ([5, 1, 6, 1], 3, []),  # one token is less than min_n
        ([1], 3, []),
        ([1, 1], 3, []),
        ([1, 1, 1], 3, [1]),
    ],
)
def test_lookup_finds_what_followed_the_longest_suffix(tokens, num_tokens, expected):
    assert look_up(np.array(tokens), 2, 3, num_tokens).tolist() == expected


def naive_look_up(tokens: list[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        found = [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:] and len(tokens) > n]
        if found:
            whole = [end for end in found if end + num_tokens <= len(tokens)]
            start = whole[-1] if whole else found[0]
            return tokens[start : start + num_tokens]
    return []


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_lookup_equals_its_definition(min_n, max_n):
    rng = np.random.default_rng(min_n * 10 + max_n)
    for _ in range(300):
        tokens = rng.integers(0, 3, rng.integers(1, 40)).tolist()
        num_tokens = int(rng.integers(1, 6))
        expected = naive_look_up(tokens, min_n, max_n, num_tokens)
        assert look_up(np.array(tokens), min_n, max_n, num_tokens).tolist() == expected, tokens


def test_lookup_proposes_for_each_sequence_what_it_has_room_for():
    """D15: ragged, with sequences that find nothing or may not draft; what lies behind a sequence's end is not read."""
    state = SequenceState(4, 16, block_size=16)
    state.token_ids[:] = 7
    texts = [[1, 2, 9, 8, 1, 2], [1, 2, 3], [5, 6, 5, 6, 5, 6], [1, 2, 9, 8, 1, 2]]
    admitted = [AdmittedSequence(i, t, len(t), 0, [i], SamplingParams(), 0, ()) for i, t in enumerate(texts)]
    limits = [3, 3, 1, 0]
    plan = StepPlan(0, [ScheduledSequence(i, len(t), limits[i], []) for i, t in enumerate(texts)], admitted)
    state.apply(plan)
    drafts = NgramProposer(2, 4).propose(state, plan)
    assert drafts.num_tokens.tolist() == [3, 0, 1, 0]
    assert drafts.token_ids[0].tolist() == [9, 8, 1]
    assert drafts.token_ids[2, 0] == 5
    assert drafts.probs is None
    none = NgramProposer(2, 4).propose(state, replace(plan, scheduled=plan.scheduled[1:2]))
    assert none.token_ids.shape == (1, 0)
