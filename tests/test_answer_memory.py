"""Past answers: found as a search finds them, within their bytes, in order, and by their owner alone."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.engine.outputs import GenerationRequest, SpeculationStats
from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.llm_engine import LLMEngine
from app.speculative.answer_memory import GRAM_LENGTHS, NUM_CANDIDATES, TOKEN_BYTES, AnswerMemory
from app.speculative.config import LEAST_MEMORY_BYTES, SuffixConfig
from app.speculative.proposer import Verdict
from app.speculative.suffix import Continuations, endings
from app.speculative.suffix_proposer import SuffixProposer
from benchmarks.workloads import matching_prefix
from tests.helpers.suffix_reference import agreed_continuation, match_length

ROOMY = AnswerMemory(16 * 2**20)  # no two grams of a test share a bucket


def look_up(memory: AnswerMemory, ending: list[int], owner: int = 0, width: int = 8) -> list[int]:
    found = look_up_all(memory, [ending], [owner], width)
    return found.token_ids[0, : found.num_tokens[0]].tolist()


def look_up_all(memory: AnswerMemory, texts: list[list[int]], owners: list[int], width: int) -> Continuations:
    token_ids = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
    for slot, text in enumerate(texts):
        token_ids[slot, : len(text)] = text
    lengths = np.array([len(text) for text in texts])
    return memory.look_up(endings(token_ids, np.arange(len(texts)), lengths), np.array(owners), width)


def brute_force(answers: list[list[int]], ending: list[int], width: int) -> tuple[list[int], int, list[bool]]:
    """Every place of every answer, the most recent first; of those that share a gram, the longest matches."""
    places = [(answer, end) for answer in reversed(answers) for end in range(len(answer) - 1, 0, -1)]
    for gram in GRAM_LENGTHS:
        alike = [(a, end) for a, end in places if match_length(a[:end], ending) >= gram][:NUM_CANDIDATES]
        if alike:
            longest = max(match_length(a[:end], ending) for a, end in alike)
            votes = [a[end : end + width] for a, end in alike if match_length(a[:end], ending) == longest]
            token_ids, unanimous = agreed_continuation(votes)
            return token_ids, longest, unanimous
    return [], 0, []


texts = st.lists(st.integers(0, 2), min_size=1, max_size=60)


@settings(deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 1)), min_size=1, max_size=8), st.lists(texts, min_size=2, max_size=2))
def test_it_finds_what_a_brute_force_search_finds(answers, asked):
    ROOMY.clear()
    for text, owner in answers:
        ROOMY.remember(np.array(text), 0, owner)
    found = look_up_all(ROOMY, asked, [0, 1], 6)
    for owner, ending in enumerate(asked):
        own = [text for text, whose in answers if whose == owner]
        token_ids, length, unanimous = brute_force(own, ending, 6)
        assert found.token_ids[owner, : found.num_tokens[owner]].tolist() == token_ids
        if token_ids:
            assert found.match_lengths[owner] == length
            assert found.unanimous[owner, : len(token_ids)].tolist() == unanimous


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_written_over_many_times_it_says_only_what_an_answer_of_its_owner_said(seed):
    rng = np.random.default_rng(seed)
    memory = AnswerMemory(200 * TOKEN_BYTES)
    answers: list[tuple[int, list[int]]] = []
    for _ in range(60):
        owner, text = int(rng.integers(0, 3)), rng.integers(0, 3, rng.integers(1, 50)).tolist()
        memory.remember(np.array(text), 0, owner)
        answers.append((owner, text))
        ending = rng.integers(0, 3, 30).tolist()
        found = look_up_all(memory, [ending], [owner], 5)
        if num := int(found.num_tokens[0]):
            matched = ending[-int(found.match_lengths[0]) :]
            assert len(matched) >= GRAM_LENGTHS[-1]
            wanted = matched + found.token_ids[0, :num].tolist()
            places = [text[i : i + len(wanted)] for whose, text in answers if whose == owner for i in range(len(text))]
            assert wanted in places


def test_its_bytes_are_what_it_was_given():
    for memory_bytes in (LEAST_MEMORY_BYTES, 5_000_000):
        memory = AnswerMemory(memory_bytes)
        assert memory_bytes - TOKEN_BYTES < memory.num_bytes <= memory_bytes
        before = memory.num_bytes
        for start in range(0, 2 * memory.capacity, 1000):
            memory.remember(np.arange(start, start + 1000), 0, owner=0)
        assert memory.num_bytes == before
    assert f"{TOKEN_BYTES} bytes a token" in SuffixConfig.model_fields["memory_bytes"].description


def numbered(answer: int) -> list[int]:
    return list(range(1000 * answer, 1000 * answer + 24))


def test_the_oldest_is_forgotten_first():
    memory = AnswerMemory(100 * TOKEN_BYTES)  # room for four answers and their ends
    for latest in range(12):
        memory.remember(np.array(numbered(latest)), 0, owner=0)
        known = [answer for answer in range(latest + 1) if look_up(memory, numbered(answer)[:12])]
        assert known == list(range(max(latest - 3, 0), latest + 1))


def test_an_answer_longer_than_half_the_memory_keeps_its_end():
    memory = AnswerMemory(100 * TOKEN_BYTES)
    memory.remember(np.arange(500), 0, owner=0)
    assert look_up(memory, [470, 471, 472]) == list(range(473, 481))
    assert look_up(memory, [440, 441, 442]) == []


def test_an_answer_is_found_from_its_first_token_on_by_the_end_of_its_prompt():
    memory = AnswerMemory(LEAST_MEMORY_BYTES)
    prompt, answer = list(range(100)), [7, 7, 8, 9]
    memory.remember(np.array(prompt + answer), len(prompt), owner=0)
    assert look_up(memory, prompt) == answer
    assert look_up(memory, prompt[:50]) == [], "of the prompt only the end is kept"
    memory.remember(np.array([500, 501, 502, 503, 504]), 5, owner=0)
    assert look_up(memory, [500, 501, 502]) == [], "without an answer there is nothing to remember"


def test_an_answer_is_its_owners():
    memory = AnswerMemory(LEAST_MEMORY_BYTES)
    memory.remember(np.array(numbered(1)), 0, owner=5)
    memory.remember(np.array([1000, 1001, 1002, 9]), 0, owner=-6)
    assert look_up(memory, [1000, 1001, 1002], owner=5)[0] == 1003
    assert look_up(memory, [1000, 1001, 1002], owner=-6) == [9]
    assert look_up(memory, [1000, 1001, 1002], owner=0) == []


def test_a_match_does_not_reach_into_the_answer_before():
    memory = AnswerMemory(LEAST_MEMORY_BYTES)
    memory.remember(np.array([1, 2]), 0, owner=0)
    memory.remember(np.array([3, 4, 5, 6]), 0, owner=0)
    found = look_up_all(memory, [[1, 2, 3, 4, 5]], [0], 4)
    assert found.match_lengths.tolist() == [3]
    assert look_up(memory, [0, 0, 1, 2]) == []


@dataclass(frozen=True)
class _Batch:
    """What the proposer reads of a batch."""

    slots: np.ndarray


class Conversation:
    """One slot of a proposer; its target says what it is told to, whatever is drafted."""

    def __init__(self, memory: AnswerMemory | None, share_memory_across_keys: bool = False) -> None:
        self.state = SequenceState(1, 256, 256)
        self.proposer = SuffixProposer(self.state, memory, share_memory_across_keys)

    def ask(self, prompt: list[int], answer: list[int], owner: int = 0, finishes: bool = True) -> tuple[int, float]:
        """Steps needed, and the share of drafts kept. `finishes`: whether the last answer ended or gave way."""
        num_steps = num_drafted = num_kept = done = 0
        drafts = self.draft(prompt, len(answer) - 1, owner, finishes)
        while done < len(answer):
            if num_steps:
                room = min(len(answer) - done - 1, 8)
                drafts = self._propose(StepPlan(0, [ScheduledSequence(0, 1, room, [])]))
            kept = matching_prefix(drafts, answer[done:])
            self._say(answer[done : done + kept + 1], kept)
            num_steps, num_drafted, num_kept = num_steps + 1, num_drafted + len(drafts), num_kept + kept
            done += kept + 1
        return num_steps, num_kept / max(num_drafted, 1)

    def draft(self, prompt: list[int], room: int = 8, owner: int = 0, finishes: bool = True) -> list[int]:
        """What is drafted behind a prompt that takes the slot."""
        admitted = [AdmittedSequence(0, prompt, len(prompt), 0, [0], SamplingParams(), 0, (), owner)]
        released = [0] if self.state.num_tokens[0] else []
        scheduled = [ScheduledSequence(0, len(prompt), min(room, 8), [])]
        return self._propose(StepPlan(0, scheduled, admitted, released, released if finishes else []))

    def _propose(self, plan: StepPlan) -> list[int]:
        self.proposer.catch_up(self.state, plan)
        self.state.apply(plan)
        drafts = self.proposer.propose(self.state, plan)
        return drafts.token_ids[0, : drafts.num_tokens[0]].tolist()

    def _say(self, emitted: list[int], num_kept: int) -> None:
        verdict = Verdict(np.array([emitted]), np.array([len(emitted)]), np.array([num_kept]), np.array([False]))
        num_known = int(self.state.num_tokens[0] - self.state.num_computed_tokens[0])
        self.state.commit(0, num_known, np.array(emitted))
        self.proposer.observe(_Batch(np.array([0])), None, verdict)


RNG = np.random.default_rng(1)
PROMPT, ANSWER = RNG.permutation(500)[:30].tolist(), (500 + RNG.permutation(500)[:90]).tolist()


def test_an_answer_that_recurs_is_drafted_from_its_first_token_on():
    conversation = Conversation(AnswerMemory(LEAST_MEMORY_BYTES))
    assert conversation.ask(PROMPT, ANSWER) == (90, 0.0), "it repeats nothing of itself"
    assert conversation.ask(PROMPT, ANSWER) == (10, 1.0)
    assert Conversation(None).ask(PROMPT, ANSWER)[0] == 90


def test_an_answer_that_recurs_in_part_is_found_again_behind_the_difference():
    conversation = Conversation(AnswerMemory(LEAST_MEMORY_BYTES))
    conversation.ask(PROMPT, ANSWER)
    num_steps, _ = conversation.ask(PROMPT, [*ANSWER[:40], 2, 1, *ANSWER[42:]])
    assert num_steps < 20


def test_keys_share_nothing_unless_they_are_told_to():
    apart = Conversation(AnswerMemory(LEAST_MEMORY_BYTES))
    together = Conversation(AnswerMemory(LEAST_MEMORY_BYTES), share_memory_across_keys=True)
    for conversation, num_steps in ((apart, 90), (together, 10)):
        conversation.ask(PROMPT, ANSWER, owner=11)
        assert conversation.ask(PROMPT, ANSWER, owner=22)[0] == num_steps
        assert conversation.ask(PROMPT, ANSWER, owner=11)[0] == 10


def test_a_sequence_that_gives_way_is_not_an_answer_yet():
    conversation = Conversation(AnswerMemory(LEAST_MEMORY_BYTES))
    conversation.ask(PROMPT, ANSWER)
    assert conversation.ask(PROMPT, ANSWER, finishes=False)[0] == 90


def test_a_fault_clears_the_memory_and_it_fills_again():
    conversation = Conversation(AnswerMemory(LEAST_MEMORY_BYTES))
    conversation.ask(PROMPT, ANSWER)
    conversation.ask([1, 2, 3], [4, 5])  # which remembers the answer before it
    conversation.proposer.reset()
    assert conversation.ask(PROMPT, ANSWER)[0] == 90
    assert conversation.ask(PROMPT, ANSWER)[0] == 10


def test_memory_is_believed_by_its_own_record():
    """Of a longer match in memory and a shorter one in the text, the one that has been right is drafted."""
    conversation = Conversation(AnswerMemory(LEAST_MEMORY_BYTES))
    both = [1, 2, 3, 8, 5, 1, 2, 3]
    conversation.ask([5, 1, 2, 3], [100, 101])
    assert conversation.draft(both, room=1) == [100]
    for number in range(2, 40):  # every answer another, and none that repeats itself
        conversation.ask([5, 1, 2, 3], [100 * number, 100 * number + 1])
    assert conversation.draft(both, room=1) == [8]


def steps_of(engine: LLMEngine, name: str, owner: int) -> SpeculationStats:
    """Of a seeded answer, which is random and the same each time."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    engine.add_request(GenerationRequest(name, [5, 6, 7, 8], params, owner=owner))
    while engine.has_work:
        for delta in engine.step():
            if delta.finished:
                return delta.stats
    raise AssertionError("the request did not end")


def test_the_owner_of_a_request_reaches_the_memory(tiny_checkpoint):
    speculative = {"method": "suffix", "num_speculative_tokens": 4, "memory_bytes": LEAST_MEMORY_BYTES}
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32", "device": "cpu"}
    engine = LLMEngine(model=str(tiny_checkpoint("llama")), speculative_config=speculative, progress=False, **sizes)
    assert steps_of(engine, "first", owner=1).num_steps > 30
    again = steps_of(engine, "again", owner=1)
    assert again.num_steps < 15
    assert again.num_accepted == again.num_drafted
    assert steps_of(engine, "another's", owner=2).num_steps > 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_bytes": 1000}, "memory_bytes is 1000, which holds next to nothing: use 1048576 or more"),
        ({"share_memory_across_keys": True}, "memory_bytes 0: there is nothing to share"),
        ({"memory_bytes": -1}, "memory_bytes"),
    ],
)
def test_a_memory_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        SuffixConfig(method="suffix", **fields)
