"""Drafters keep their KV in step with the target whatever the schedule does; lookup finds what is there."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.config import DraftModelConfig, NgramConfig
from app.speculative.draft_length import FixedDraftLength
from app.speculative.draft_model import check_same_vocabulary, extend_positions
from app.speculative.drafter_kv import DrafterKV
from app.speculative.loaded_proposer import TargetContext
from app.speculative.ngram import NgramProposer, look_up
from app.speculative.registry import PROPOSERS, load_proposer
from models.config import read_model_config
from models.layers.rotary import RotaryEmbedding
from models.loader import load_model
from models.tokenizer import load_tokenizer
from tests.helpers.drafting_engine import CPU, DraftingEngine
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


def test_steps_without_drafts_keep_the_drafter_warm_at_the_cost_of_few_passes():
    """k = 0 for a while: acceptance does not collapse when drafting resumes, and passes wait for a block's worth."""
    engine = make_engine(KVReadingModel(VOCAB), k=3, max_num_seqs=1, caching=False)
    sequence = engine.add(PROMPTS[4], temperature=0.0, ignore_eos=True, max_tokens=60)
    for k, num_steps in ((3, 4), (0, 21), (2, 3), (0, 1), (1, 2), (0, 2), (3, 100)):
        engine.k = k
        num_passes = len(engine.drafter.passes)
        for _ in range(num_steps):
            engine.step()
        if (k, num_steps) == (0, 21):
            assert len(engine.drafter.passes) - num_passes == 5  # blocks of 4 tokens
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


def make_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    )


def test_vocabularies_are_compared_id_by_id():
    """E10: the first differing id is named, with what it is on both sides."""
    tokens = [f"t{i}" for i in range(20)]
    target = make_tokenizer(tokens)
    check_same_vocabulary(target, make_tokenizer(tokens))
    swapped = [*tokens[:5], "t9", *tokens[6:9], "t5", *tokens[10:]]
    with pytest.raises(ValueError, match="token 5 is 't9' to the draft model and 't5' to the target"):
        check_same_vocabulary(target, make_tokenizer(swapped))
    with pytest.raises(ValueError, match="token 20 is 'more' to the draft model and nothing to the target"):
        check_same_vocabulary(target, make_tokenizer([*tokens, "more"]))
    with pytest.raises(ValueError, match="token 18 is nothing to the draft model and 't18' to the target"):
        check_same_vocabulary(target, make_tokenizer(tokens[:18]))


def target_context(folder, max_model_len=128) -> TargetContext:
    return TargetContext(
        read_model_config(folder), load_tokenizer(folder), max_model_len, torch.float32, CPU, progress=False
    )


def test_a_draft_model_of_another_vocabulary_is_refused_before_its_weights_are_read(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint("llama")
    other = tmp_path / "draft"
    make_tokenizer(["<unk>", "a", "b"]).save_pretrained(other)
    (other / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"speculative_config\.model: token 0 is '<unk>'"):
        load_proposer(DraftModelConfig(method="draft_model", model=str(other)), target_context(folder))


def test_the_registry_loads_each_method_and_says_what_kv_it_needs(tiny_checkpoint):
    folder = tiny_checkpoint("llama", num_hidden_layers=1)
    target = target_context(tiny_checkpoint("llama"))
    configs = [NgramConfig(method="ngram"), DraftModelConfig(method="draft_model", model=str(folder))]
    assert sorted(PROPOSERS) == sorted(config.method for config in configs)
    ngram, draft_model = (load_proposer(config, target) for config in configs)
    assert load_proposer(None, target) is None
    assert (len(ngram.kv_specs), ngram.soft_drafts) == (0, False)
    assert (len(draft_model.kv_specs), draft_model.soft_drafts) == (1, True)


def test_rotary_tables_cover_the_served_context(tiny_checkpoint):
    """D10: a draft checkpoint that states 32 positions, a target that serves 128."""
    short, long = (tiny_checkpoint("llama3", max_position_embeddings=n) for n in (32, 128))
    model, reference = (load_model(folder, torch.float32, CPU, False) for folder in (short, long))
    extend_positions(model, 128)
    tables = [
        [module.cos_sin_cache for module in each.modules() if isinstance(module, RotaryEmbedding)]
        for each in (model, reference)
    ]
    assert len(tables[0]) == len(tables[1]) > 0
    for ours, theirs in zip(*tables, strict=True):
        assert torch.equal(ours, theirs)
    extend_positions(model, 64)
    assert all(len(table) == 128 for table in tables[0])


def test_blocks_handed_out_anew_are_whole_no_longer():
    state, kv = SequenceState(2, 32, block_size=4), None
    kv = DrafterKV(state, num_blocks=8)

    def step(**fields) -> None:
        plan = StepPlan(0, **{"scheduled": [], **fields})
        state.apply(plan)
        kv.apply(plan)

    def admitted(num_cached: int, blocks: list[int], slot: int = 0) -> AdmittedSequence:
        return AdmittedSequence(slot, list(range(13)), 13, num_cached, blocks, SamplingParams(), 0, ())

    step(admitted=[admitted(0, [3, 5, 6, 7])])
    kv.extend(np.array([0]), np.array([9]))
    step(admitted=[admitted(12, [3, 5, 6, 2], slot=1)])
    assert kv.num_computed_tokens.tolist() == [9, 8]  # of block 6 only a token is there
    step(released_slots=[0, 1], admitted=[admitted(4, [3, 5, 1, 2])])
    assert kv.num_computed_tokens[0] == 4  # block 5 was handed out anew
    kv.extend(np.array([0]), np.array([4]))
    step(scheduled=[ScheduledSequence(0, 1, 0, [6])], admitted=[admitted(12, [3, 5, 1, 4], slot=1)])
    assert kv.num_computed_tokens.tolist() == [8, 8]
    kv.reset()
    assert kv.num_computed_tokens.tolist() == [0, 0]
    step(released_slots=[0], admitted=[admitted(12, [3, 5, 1, 7])])
    assert kv.num_computed_tokens[0] == 0


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


def test_the_draft_length_is_the_smaller_of_the_servers_and_the_requests():
    engine = make_engine(KVReadingModel(VOCAB))
    sequences = [engine.add([1], num_speculative_tokens=own) for own in (None, 0, 2, 9)]
    length = FixedDraftLength(4)
    assert [length(sequence) for sequence in sequences] == [4, 0, 2, 4]
    length.num_speculative_tokens = 1
    assert [length(sequence) for sequence in sequences] == [1, 0, 1, 1]
