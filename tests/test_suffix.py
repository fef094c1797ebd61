"""Suffix decoding against a brute-force search, and what it believes of its drafts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.match_calibration import MatchCalibration
from app.speculative.proposer import Verdict
from app.speculative.suffix import MAX_MATCH_LENGTH, MAX_OCCURRENCES, Continuation, continue_suffix, occurrences
from app.speculative.suffix_proposer import SuffixProposer


def brute_force(text: list[int], num_tokens: int) -> tuple[list[int], list[int], list[float]]:
    """The definition: longest earlier match of the ending, then the majority's next token, latest first in a tie."""
    n = len(text)

    def match_length(end: int) -> int:
        length = 0
        while length < min(MAX_MATCH_LENGTH, end) and text[end - 1 - length] == text[n - 1 - length]:
            length += 1
        return length

    ends = [end for end in range(2, n) if match_length(end) >= 2][-MAX_OCCURRENCES:]
    if not ends:
        return [], [], []
    longest = max(map(match_length, ends))
    alive = [end for end in ends if match_length(end) == longest]
    token_ids, lengths, shares = [], [], []
    for offset in range(num_tokens):
        alive = [end for end in alive if end + offset < n]
        if not alive:
            break
        counts = Counter(text[end + offset] for end in alive)
        latest = {text[end + offset]: end for end in alive}
        best = max(counts, key=lambda token: (counts[token], latest[token]))
        token_ids.append(best)
        lengths.append(longest + offset)
        shares.append(counts[best] / len(alive))
        alive = [end for end in alive if text[end + offset] == best]
    return token_ids, lengths, shares


def look_up(text: list[int], num_tokens: int) -> Continuation | None:
    array = np.array(text, dtype=np.int64)
    ends = occurrences(array)
    return continue_suffix(array, ends, array, num_tokens) if len(ends) else None


@given(st.lists(st.integers(0, 2), max_size=120), st.integers(1, 10))
def test_it_finds_what_a_brute_force_search_finds(text, num_tokens):
    token_ids, lengths, shares = brute_force(text, num_tokens)
    found = look_up(text, num_tokens)
    if found is None:
        assert token_ids == []
        return
    assert found.token_ids.tolist() == token_ids
    assert found.match_lengths.tolist() == lengths
    assert found.shares.tolist() == pytest.approx(shares)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_to_find(text):
    assert look_up(text, 4) is None


def test_the_majority_decides_and_says_by_how_much():
    found = look_up([7, 8, 1, 9, 7, 8, 2, 9, 7, 8, 1, 5, 7, 8], 1)
    assert found.token_ids.tolist() == [1]
    assert found.shares.tolist() == [pytest.approx(2 / 3)]


def continuation(length: int, num_tokens: int = 1) -> Continuation:
    return Continuation(np.arange(num_tokens), length + np.arange(num_tokens), np.ones(num_tokens))


def test_longer_matches_are_believed_more():
    calibration = MatchCalibration(1)
    believed = [calibration.probabilities(0, continuation(length))[0] for length in (2, 4, 8, 16)]
    assert believed == sorted(believed)
    assert believed[0] < 0.6 < 0.9 < believed[-1]


def test_belief_follows_what_the_target_says():
    calibration = MatchCalibration(2)
    for i in range(400):
        calibration.observe(i % 2, continuation(2), num_kept=int(i % 10 == 0))
    assert calibration.probabilities(0, continuation(2))[0] == pytest.approx(0.1, abs=0.06)
    for _ in range(60):
        calibration.observe(0, continuation(2), num_kept=1)
    assert calibration.probabilities(0, continuation(2))[0] > calibration.probabilities(1, continuation(2))[0] + 0.1
    calibration.admit(0)
    assert calibration.probabilities(0, continuation(2))[0] < 0.6, "a new sequence knows the shared record only"


class _Batch:
    def __init__(self, slots: list[int]) -> None:
        self.slots = np.array(slots)


def test_predictions_are_judged_whether_drafted_or_not():
    """The controller may cut every draft; the target's tokens tell all the same what they were worth."""
    state = SequenceState(2, 64, 8)
    proposer = SuffixProposer(state)
    prompt = [3, 4, 5, 6, 3, 4]
    admitted = [AdmittedSequence(0, prompt, len(prompt), 0, [0], SamplingParams(), 0, ())]
    plan = StepPlan(0, [ScheduledSequence(0, len(prompt), 3, [])], admitted)
    state.apply(plan)
    drafts = proposer.propose(state, plan)
    assert drafts.token_ids[0].tolist() == [5, 6, 3]
    assert drafts.num_tokens.tolist() == [3]
    before = drafts.acceptance[0, 0]
    for _ in range(20):
        verdict = Verdict(np.array([[9, 0, 0, 0]]), np.array([1]), np.array([0]), np.array([False]))
        proposer.observe(_Batch([0]), None, verdict)
        drafts = proposer.propose(state, StepPlan(1, plan.scheduled))
    assert drafts.acceptance[0, 0] < before / 2


def test_a_sequence_that_may_not_draft_is_not_looked_up():
    state = SequenceState(1, 64, 8)
    proposer = SuffixProposer(state)
    admitted = [AdmittedSequence(0, [3, 4, 3, 4], 4, 0, [0], SamplingParams(), 0, ())]
    plan = StepPlan(0, [ScheduledSequence(0, 4, 0, [])], admitted)
    state.apply(plan)
    assert proposer.propose(state, plan).num_tokens.tolist() == [0]
