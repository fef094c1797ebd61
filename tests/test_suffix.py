"""Suffix decoding against a brute-force search, and what it believes of its drafts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.match_calibration import MatchCalibration
from app.speculative.proposer import Verdict
from app.speculative.suffix import MAX_OCCURRENCES, Continuations, continue_sequences
from app.speculative.suffix_proposer import SuffixProposer
from tests.helpers.suffix_reference import agreed_continuation, match_length


def brute_force(text: list[int], num_tokens: int) -> tuple[list[int], int, list[bool]]:
    """The definition: of the longest earlier matches of the ending, what they agree on most."""
    lengths = {end: match_length(text[:end], text) for end in range(2, len(text))}
    longest = max(lengths.values(), default=0)
    if longest < 2:
        return [], 0, []
    ends = [end for end in reversed(lengths) if lengths[end] == longest][:MAX_OCCURRENCES]
    token_ids, unanimous = agreed_continuation([text[end : end + num_tokens] for end in ends])
    return token_ids, longest, unanimous


def look_up(texts: list[list[int]], num_tokens: int) -> Continuations:
    token_ids = np.full((2 * len(texts) + 1, max(map(len, texts)) + 1), 1)  # what a slot held before is not seen
    slots = np.arange(2 * len(texts) - 1, 0, -2)
    for slot, text in zip(slots, texts, strict=True):
        token_ids[slot, : len(text)] = text
    return continue_sequences(token_ids, slots, np.array([len(text) for text in texts]), num_tokens)


@given(st.lists(st.lists(st.integers(0, 2), max_size=120), min_size=1, max_size=4), st.integers(1, 10))
def test_it_finds_what_a_brute_force_search_finds(texts, num_tokens):
    found = look_up(texts, num_tokens)
    for i, text in enumerate(texts):
        token_ids, length, unanimous = brute_force(text, num_tokens)
        assert found.token_ids[i, : found.num_tokens[i]].tolist() == token_ids
        if token_ids:
            assert found.match_lengths[i] == length
            assert found.unanimous[i, : len(token_ids)].tolist() == unanimous


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_many_occurrences_are_narrowed_to_the_longest(seed, periods):
    """Long periodic texts with flaws: far more than a few places end alike."""
    rng = np.random.default_rng(seed)
    texts = []
    for period in periods:
        text = np.tile(rng.integers(0, 3, period), 60)
        text[rng.integers(0, len(text), 3)] = 4
        texts.append(text[: rng.integers(10, len(text))].tolist())
    found = look_up(texts, 6)
    for i, text in enumerate(texts):
        token_ids, *_ = brute_force(text, 6)
        assert found.token_ids[i, : found.num_tokens[i]].tolist() == token_ids


def test_a_text_of_one_token_is_compared_piece_by_piece():
    found = look_up([[7] * 5000, [1, 2, 3, 1, 2]], 3)
    assert found.token_ids[:, :3].tolist() == [[7, 7, 7], [3, 1, 2]]
    assert found.match_lengths.tolist() == [24, 2]


def test_nothing_to_find():
    assert look_up([[], [1], [1, 2], [1, 2, 3, 4]], 4).num_tokens.tolist() == [0, 0, 0, 0]


def test_the_majority_decides_and_dissent_is_told():
    found = look_up([[7, 8, 1, 9, 7, 8, 2, 9, 7, 8, 1, 5, 7, 8]], 1)
    assert found.token_ids.tolist() == [[1]]
    assert found.unanimous.tolist() == [[False]]


def continuation(length: int, num_tokens: int = 1) -> Continuations:
    return Continuations(
        np.arange(num_tokens)[None], np.array([num_tokens]), np.array([length]), np.ones((1, num_tokens), dtype=bool)
    )


def believed(calibration: MatchCalibration, slot: int, length: int) -> float:
    return calibration.probabilities(np.array([slot]), continuation(length))[0, 0]


def judge(calibration: MatchCalibration, slot: int, length: int, kept: bool) -> None:
    emitted = np.array([[0 if kept else 9]])
    calibration.observe(np.array([slot]), continuation(length), np.array([0]), emitted, np.array([1]))


def test_longer_matches_are_believed_more():
    calibration = MatchCalibration(1)
    values = [believed(calibration, 0, length) for length in (2, 4, 8, 16)]
    assert values == sorted(values)
    assert values[0] < 0.6 < 0.9 < values[-1]


def test_belief_follows_what_the_target_says():
    calibration = MatchCalibration(2)
    for i in range(400):
        judge(calibration, i % 2, 2, kept=i % 10 == 0)
    assert believed(calibration, 0, 2) == pytest.approx(0.1, abs=0.06)
    for _ in range(60):
        judge(calibration, 0, 2, kept=True)
    assert believed(calibration, 0, 2) > believed(calibration, 1, 2) + 0.1
    calibration.admit(0)
    assert believed(calibration, 0, 2) < 0.6, "a new sequence knows the shared record only"


def test_only_what_the_target_has_spoken_of_is_judged():
    """Tokens 0, 1, 2 predicted; one is emitted, and it is the first: nothing is known of the others."""
    calibration, untouched = MatchCalibration(1), MatchCalibration(1)
    slots, rows = np.array([0]), np.array([0])
    calibration.observe(slots, continuation(5, 3), rows, np.array([[0, 7, 7, 7]]), np.array([1]))
    assert calibration.probabilities(slots, continuation(5, 3))[0, 0] > believed(untouched, 0, 5)
    calibration.admit(0)
    assert believed(calibration, 0, 6) == believed(untouched, 0, 6)
    calibration.observe(slots, continuation(5, 3), rows, np.array([[0, 7, 7, 7]]), np.array([2]))
    assert believed(calibration, 0, 6) < believed(untouched, 0, 6)


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
    state = SequenceState(2, 64, 8)
    proposer = SuffixProposer(state)
    admitted = [AdmittedSequence(slot, [3, 4, 3, 4], 4, 0, [slot], SamplingParams(), 0, ()) for slot in (0, 1)]
    plan = StepPlan(0, [ScheduledSequence(0, 4, 0, []), ScheduledSequence(1, 4, 1, [])], admitted)
    state.apply(plan)
    drafts = proposer.propose(state, plan)
    assert drafts.num_tokens.tolist() == [0, 1]
    assert drafts.token_ids.tolist()[1] == [3]
