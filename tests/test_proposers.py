"""A draft model keeps its KV in step with the target whatever the schedule does, and its drafts are honest."""

import functools

import numpy as np
import pytest
import torch

from tests.helpers.drafting_engine import DraftingEngine
from tests.helpers.kv_reading_model import KVReadingModel

VOCAB = 50
NUM_TOKENS = 14  # of each text
rng = np.random.default_rng(3)
PROMPTS = [rng.integers(1, VOCAB, length).tolist() for length in (1, 2, 5, 8, 16, 17, 33, 40)]
GREEDY = [{}] * len(PROMPTS)
MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "seed": 5, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 4},
] * 2

SCHEDULES = {
    "one by one": {"max_num_seqs": 1},
    "batch": {},
    "chunked": {"max_num_batched_tokens": 9},
    "preempted": {"num_blocks": 24},
    "preempted, uncached": {"num_blocks": 24, "caching": False},
    "chunked and preempted": {"num_blocks": 18, "max_num_batched_tokens": 11},
    "blocks of one": {"block_size": 1},
}


def make_engine(drafter: KVReadingModel, **sizes) -> DraftingEngine:
    return DraftingEngine(KVReadingModel(VOCAB), drafter, **sizes)


def plain_texts(params: list[dict]) -> list[list[int]]:
    return make_engine(KVReadingModel(VOCAB), k=0).texts(PROMPTS, params)


@functools.cache
def plain_greedy_texts() -> list[list[int]]:
    return plain_texts(GREEDY)


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_perfect_drafter_is_always_accepted(schedule, params):
    """C06, C07: chunks, preemptions and cache hits leave it no stale, missing or foreign KV. Twice, for the cache."""
    engine = make_engine(KVReadingModel(VOCAB), k=3, **SCHEDULES[schedule])
    for _ in range(2):
        texts = engine.texts(PROMPTS, params)
        if params is GREEDY:
            assert texts == plain_greedy_texts()
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0
    assert engine.worker.faults == []
    if "preempted" in schedule:
        assert engine.scheduler.num_preemptions > 0
    elif SCHEDULES[schedule].get("caching", True):
        assert engine.scheduler.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_middling_drafter_changes_no_greedy_text(schedule):
    engine = make_engine(KVReadingModel(VOCAB, noise=2.0), k=4, **SCHEDULES[schedule])
    assert engine.texts(PROMPTS, GREEDY) == plain_greedy_texts()
    stats = engine.scheduler.speculation_stats
    assert 0 < stats.num_accepted < stats.num_drafted
    assert stats.accepted_per_position[0] > stats.accepted_per_position[-1]


def test_rejections_leave_only_valid_kv_behind():
    """After wrong drafts the drafter's next first draft is as good as a fresh drafter's: it never reads their KV."""
    engine = make_engine(KVReadingModel(VOCAB, noise=3.0), k=4, caching=False)
    engine.texts(PROMPTS, GREEDY)
    stats = engine.scheduler.speculation_stats
    fresh = make_engine(KVReadingModel(VOCAB, noise=3.0), k=4, caching=False)
    propose = fresh.proposer.propose

    def forgetful(state, plan):
        fresh.proposer.reset()
        return propose(state, plan)

    fresh.proposer.propose = forgetful
    fresh.texts(PROMPTS, GREEDY)
    assert fresh.scheduler.speculation_stats == stats
    assert sum(fresh.drafter.passes) > 3 * sum(engine.drafter.passes)


def test_steps_without_drafts_cost_no_pass_and_are_made_up_for():
    """k = 0 for a while: acceptance does not collapse when drafting resumes, and what was missed is run in one pass."""
    engine = make_engine(KVReadingModel(VOCAB), k=3, max_num_seqs=1, caching=False)
    sequence = engine.add(PROMPTS[4], temperature=0.0, ignore_eos=True, max_tokens=60)
    for k, num_steps in ((3, 4), (0, 21), (2, 3), (0, 1), (1, 2), (0, 2), (3, 100)):
        engine.k = k
        num_passes = len(engine.drafter.passes)
        for _ in range(num_steps):
            engine.step()
        if (k, num_steps) == (0, 21):
            assert len(engine.drafter.passes) == num_passes
        if (k, num_steps) == (2, 3):
            assert engine.drafter.passes[num_passes] > 21
    assert len(engine.output(sequence)) == 60
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0


def test_nothing_is_computed_twice():
    """Every known token is the drafter's input once, each draft but a step's last once more where it was rejected."""
    engine = make_engine(KVReadingModel(VOCAB), k=3, caching=False)
    texts = engine.texts(PROMPTS, GREEDY)
    num_tokens = sum(len(prompt) + len(text) for prompt, text in zip(PROMPTS, texts, strict=True))
    assert sum(engine.drafter.passes) <= num_tokens


def test_sequences_with_speculation_off_cost_no_drafter_rows():
    engine = make_engine(KVReadingModel(VOCAB), k=3)
    engine.texts(PROMPTS, [{"num_speculative_tokens": 0}] * len(PROMPTS))
    assert engine.drafter.passes == []
    some = [{"num_speculative_tokens": 0} if i % 2 else {} for i in range(len(PROMPTS))]
    assert engine.texts(PROMPTS, some) == plain_greedy_texts()
    num_drafting = sum(len(prompt) + NUM_TOKENS for prompt in PROMPTS[::2])
    assert 0 < sum(engine.drafter.passes) <= num_drafting
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0


def test_a_prefix_hit_on_blocks_the_drafter_never_saw_is_computed_from_the_tokens():
    """C07: the first run leaves the target's blocks in the cache and the drafter's pool full of canaries."""
    engine = make_engine(KVReadingModel(VOCAB), k=3, max_num_seqs=1)
    engine.texts([PROMPTS[7]], [{"num_speculative_tokens": 0}])
    assert engine.texts([PROMPTS[7]], [{}]) == [plain_greedy_texts()[7]]
    assert engine.scheduler.num_prefix_hit_tokens >= 36
    assert sum(engine.drafter.passes) >= len(PROMPTS[7])
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0

    num_rows = sum(engine.drafter.passes)  # and now it has seen them
    engine.texts([PROMPTS[7]], [{}])
    assert sum(engine.drafter.passes) - num_rows < len(PROMPTS[7])
    assert stats.num_accepted == stats.num_drafted


def test_blocks_used_again_with_the_drafter_off_are_not_taken_for_its_own():
    """C07: what the drafter once computed in a block says nothing of the tokens that the block holds now."""
    engine = make_engine(KVReadingModel(VOCAB), k=3, max_num_seqs=2)
    engine.texts([PROMPTS[7]] * 2, [{}] * 2)  # one of the two is not in the prefix cache: its blocks go out again first
    prompt = [token % (VOCAB - 1) + 1 for token in PROMPTS[7][:20]]
    (text,) = engine.texts([prompt], [{"num_speculative_tokens": 0}])
    engine.texts([prompt + text], [{}])
    assert engine.scheduler.num_prefix_hit_tokens == 32
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0


def test_requests_and_sequences_differ_in_their_number_of_drafts():
    params = [{"num_speculative_tokens": i % 5, "max_tokens": 3 + i} for i in range(len(PROMPTS))]
    engine = make_engine(KVReadingModel(VOCAB), k=4)
    texts = engine.texts(PROMPTS, params)
    assert texts == [text[: 3 + i] for i, text in enumerate(plain_greedy_texts())]
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0
    for i, sequence in enumerate(engine.sequences):
        assert len(sequence.stats.drafted_per_position) <= i % 5


def test_seeded_text_is_the_same_with_and_without_the_drafter():
    params = [{"temperature": 1.1, "top_p": 0.9, "seed": 40 + i} for i in range(len(PROMPTS))]
    expected = plain_texts(params)
    for noise, k in ((0.0, 1), (0.0, 4), (2.0, 3)):
        engine = make_engine(KVReadingModel(VOCAB, noise), k=k)
        assert engine.texts(PROMPTS, params) == expected
        stats = engine.scheduler.speculation_stats
        assert (stats.num_accepted == stats.num_drafted) == (noise == 0)


def test_soft_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """Unseeded requests at temperature 1, from a drafter that disagrees: the rate is 1 - total variation on average."""
    target, drafter = KVReadingModel(VOCAB), KVReadingModel(VOCAB, noise=1.5)
    hashes = torch.arange(10_007)[:, None]
    probs, draft_probs = (model.compute_logits(hashes).double().softmax(-1) for model in (target, drafter))
    overlap = torch.minimum(probs, draft_probs).sum(-1).mean().item()
    engine = DraftingEngine(target, drafter, k=1, max_num_batched_tokens=128)
    engine.texts(PROMPTS * 4, [{"temperature": 1.0, "max_tokens": 60}] * len(PROMPTS) * 4)
    assert engine.scheduler.speculation_stats.acceptance_rate == pytest.approx(overlap, abs=0.05)


def test_after_a_fault_drafting_starts_clean():
    """The step goes on without drafts; what the drafter knew is forgotten, and acceptance comes back in full."""
    engine = make_engine(KVReadingModel(VOCAB), k=3)
    compute_logits, calls = engine.drafter.compute_logits, []

    def now_and_then(hidden_states):
        calls.append(1)
        if len(calls) % 7 == 0:
            raise RuntimeError("out of luck")
        return compute_logits(hidden_states)

    engine.drafter.compute_logits = now_and_then
    assert engine.texts(PROMPTS, GREEDY) == plain_greedy_texts()
    assert any("out of luck" in fault for fault in engine.worker.faults)
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0


def test_a_drafter_without_numbers_drafts_no_further():
    """NaN in the drafter's logits costs that sequence its drafts, nothing else."""
    engine = make_engine(KVReadingModel(VOCAB), k=3)
    engine.drafter.broken_at = set(range(0, 10_007, 3))
    assert engine.texts(PROMPTS, GREEDY) == plain_greedy_texts()
    stats = engine.scheduler.speculation_stats
    assert stats.num_accepted == stats.num_drafted > 0
    assert stats.num_drafted < stats.num_steps * 3 * 0.8
    assert engine.worker.faults == []


@pytest.mark.parametrize("draft_vocab_size", [VOCAB - 6, VOCAB + 30])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 1.5, "seed": 1}])
def test_padding_of_either_vocabulary_is_never_drafted_or_looked_up(draft_vocab_size, params):
    """E10 at run time: the models assert that no id is beyond their own vocabulary."""
    engine = make_engine(KVReadingModel(draft_vocab_size), k=3)
    engine.texts(PROMPTS, [params] * len(PROMPTS))
    assert engine.worker.faults == []
    assert engine.scheduler.speculation_stats.num_drafted > 0
