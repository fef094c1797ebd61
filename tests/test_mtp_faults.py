"""Faults that servers with MTP drafters had: KV of chunks, of cached prefixes, after failures; numbers of drafts."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.speculative.followed_sequences import FollowedSequences
from tests.helpers.deferring_executor import defer
from tests.helpers.mtp_reference import DraftRecorder, MTPReference, poison
from tests.test_lossless import kv_bytes

TOLERANCE = 2e-4
PROMPT = np.random.default_rng(1).integers(3, 300, 45).tolist()


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    return tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=2)


def make_engine(folder, **fields) -> LLMEngine:
    defaults = {
        "max_model_len": 80,
        "block_size": 16,
        "max_num_seqs": 4,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    }
    return LLMEngine(model=str(folder), dtype="float32", device="cpu", progress=False, **defaults | fields)


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def block_bytes(folder) -> int:
    """Bytes of four tokens' KV, the modules' among it."""
    return 4 * kv_bytes(folder, torch.float32, with_modules=True)


def drafter_pools(engine: LLMEngine) -> list[torch.Tensor]:
    """A module each: [num_blocks, block_size, 40]."""
    return [pool for (pool,) in engine.executor.worker.proposer._context.kv_layers]


def modules_kv(folder, budget: int) -> list[torch.Tensor]:
    """Of each module, the KV of a prompt that has just been computed; what is not its own is left as it was."""
    engine = make_engine(folder, max_num_batched_tokens=budget)
    for pool in drafter_pools(engine):
        pool.fill_(torch.nan)
    engine.add_request(GenerationRequest("one", PROMPT, greedy(2)))
    for step in range(100):
        deltas = engine.step()
        assert engine.stats()["num_drafted"] == 0, "no chunk drafts, nor does the step before the first token"
        if deltas:
            break
        assert step < -(-len(PROMPT) // budget)
    worker = engine.executor.worker
    worker.proposer._compute_held(worker.state)
    blocks = worker.state.block_table[0, :3].tolist()
    kv = []
    for module, pool in enumerate(drafter_pools(engine)):
        num_settled = len(PROMPT) - module
        rows = pool[blocks].flatten(0, 1)
        assert rows[:num_settled].isfinite().all()
        others = [block for block in range(len(pool)) if block not in blocks]
        assert rows[num_settled:].isnan().all()
        assert pool[others].isnan().all(), "a row outside the sequence's blocks was written"
        kv.append(rows[:num_settled])
    engine.shutdown()
    return kv


def test_the_modules_kv_is_the_same_for_all_chunk_sizes(folder):
    """C06, D11: a chunk's last row holds the prompt's next token, never a guess."""
    whole = modules_kv(folder, 256)
    for budget in (4, 7, 44):
        for ours, expected in zip(modules_kv(folder, budget), whole, strict=True):
            torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_hit_ends_where_the_next_tokens_differ(folder, monkeypatch):
    """C08: the modules' KV at a block's end depends on the two tokens after it; whoever shares them loses none."""
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    other = [*PROMPT[:32], (PROMPT[32] + 1) % 300, *PROMPT[33:]]
    num_hit = []
    for prompt in (PROMPT, other, PROMPT, other, PROMPT[:34], PROMPT[:33]):
        before = engine.stats()["num_prefix_hit_tokens"]
        engine.generate(prompt, greedy(), use_tqdm=False)
        num_hit.append(engine.stats()["num_prefix_hit_tokens"] - before)
    assert num_hit == [0, 16, 32, 32, 32, 16]
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_a_cached_prefix_is_drafted_from_as_well_as_a_fresh_one(folder, monkeypatch):
    """C07: every draft of the first run is drawn again in the second, nearly all of whose prompt comes from the cache.

    What the first run left in blocks that are no known prefix is poisoned between the two.
    """
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    engine.generate(PROMPT, greedy(12), use_tqdm=False)
    first, recorder.steps = recorder.steps, []
    poison(engine)
    engine.generate(PROMPT, greedy(12), use_tqdm=False)
    assert engine.stats()["num_prefix_hit_tokens"] == 32
    assert [(step.known, step.drafts) for step in recorder.steps] == [(step.known, step.drafts) for step in first]
    for ours, expected in zip(recorder.steps, first, strict=True):
        torch.testing.assert_close(ours.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_after_a_fault_only_what_can_be_computed_is_drafted(folder, monkeypatch):
    """C07: the modules can not be run over rows whose hidden states are gone; text goes on, and the KV is not read."""
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    expected = engine.generate(PROMPT, greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    proposer = engine.executor.worker.proposer
    with monkeypatch.context() as broken:
        broken.setattr(proposer, "_run", None)
        engine.add_request(GenerationRequest("running", PROMPT[:40], greedy(12)))
        while engine.stats()["num_drafter_faults"] == 0:
            engine.step()
    for pool in drafter_pools(engine):
        pool.fill_(torch.nan)
    num_drafted = engine.stats()["num_drafted"]
    while engine.has_work:
        engine.step()
    assert engine.generate(PROMPT, greedy(12), use_tqdm=False)[0].outputs[0].token_ids == expected
    assert engine.stats()["num_drafted"] == num_drafted, "both had tokens whose hidden states are gone"
    assert engine.stats()["num_drafter_faults"] == 1
    engine.generate(PROMPT[1:], greedy(12), use_tqdm=False)
    assert engine.stats()["num_drafted"] > num_drafted
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_a_prefix_that_the_drafter_lacks_is_computed_once_more_and_drafted_from(folder, monkeypatch):
    """Else nobody who shares a hot system prompt would draft again; blocks in use stay in use."""
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    expected = engine.generate(PROMPT, greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    engine.executor.worker.proposer.reset()
    token_ids: dict[str, list[int]] = {}
    num_hit = []
    for name in ("blind", "computes it", "shares it"):
        before = engine.stats()["num_prefix_hit_tokens"]
        engine.add_request(GenerationRequest(name, PROMPT, greedy(12)))
        token_ids[name] = []
        while not token_ids[name]:
            for delta in engine.step():
                token_ids[delta.request_id] += delta.token_ids
            poison(engine)
        num_hit.append(engine.stats()["num_prefix_hit_tokens"] - before)
    num_drafted = {}
    while engine.has_work:
        for delta in engine.step():
            token_ids[delta.request_id] += delta.token_ids
            if delta.finished:
                num_drafted[delta.request_id] = delta.stats.num_drafted
        poison(engine)
    assert token_ids == dict.fromkeys(token_ids, expected)
    assert num_hit == [32, 0, 32]
    assert num_drafted["blind"] == 0 < min(num_drafted["computes it"], num_drafted["shares it"])
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_a_drafter_that_keeps_failing_leaves_the_prefix_cache_what_it_is(folder):
    engine = make_engine(folder, kv_cache_memory=4 * 20 * block_bytes(folder))
    assert engine.stats()["num_blocks"] == 20
    num_rounds, num_hit = 200, []
    for _ in range(num_rounds):
        before = engine.stats()["num_prefix_hit_tokens"]
        engine.generate(PROMPT, greedy(1), use_tqdm=False)
        num_hit.append(engine.stats()["num_prefix_hit_tokens"] - before)
        engine.executor.worker.proposer.reset()
    assert num_hit[:4] == [0, 32, 0, 32]
    assert num_hit.count(0) <= 1 + 20 // 2 + 2


def test_while_drafts_do_not_pay_the_prefix_cache_is_left_alone(folder, monkeypatch):
    monkeypatch.setattr(FollowedSequences, "pays", False)
    engine = make_engine(folder, speculative_config={"method": "mtp"})
    for _ in range(4):
        engine.generate(PROMPT, greedy(), use_tqdm=False)
        engine.executor.worker.proposer.reset()
    assert engine.stats()["num_prefix_hit_tokens"] == 3 * 32


def test_no_draft_is_planned_where_there_is_nothing_to_draft_from(folder, monkeypatch):
    """One that was counted upon and does not come would make the controller distrust those of other sequences."""
    engine = make_engine(folder, speculative_config={"method": "mtp"})
    worker, plans = engine.executor.worker, []
    choose = worker.controller.plan

    def recorded(state, plan):
        plans.append(plan)
        return choose(state, plan)

    monkeypatch.setattr(worker.controller, "plan", recorded)
    monkeypatch.setattr(FollowedSequences, "give_up", lambda self, plan: [])  # whatever this machine's clock says
    engine.generate(PROMPT, greedy(12), use_tqdm=False)
    worker.proposer.reset()
    plans.clear()
    engine.generate(PROMPT, greedy(12), use_tqdm=False)
    assert engine.stats()["num_prefix_hit_tokens"] == 32
    assert not any(plan.num_draft_tokens for plan in plans)
    engine.generate(PROMPT[1:], greedy(12), use_tqdm=False)
    assert any(plan.num_draft_tokens for plan in plans)


def test_requests_that_leave_take_nothing_from_those_that_stay(folder, monkeypatch):
    """D03, D08: aborted between any two steps, slots and blocks handed on at once."""
    recorder, rng = DraftRecorder(monkeypatch), np.random.default_rng(3)
    engine = make_engine(folder, block_size=4, max_num_batched_tokens=24)
    for i in range(12):
        engine.add_request(GenerationRequest(f"{i}", PROMPT[i : i + 3 + 3 * i], greedy(10)))
    while engine.has_work:
        engine.step()
        poison(engine)
        if rng.random() < 0.3:
            engine.abort_request(str(rng.integers(12)))
    stats = engine.stats()
    assert stats["num_aborted"] > 2 < stats["num_finished"]
    assert stats["num_drafter_faults"] == 0
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_drafts_with_plans_in_flight_are_those_of_the_modules(folder, monkeypatch):
    """Ends and aborts with a plan behind them, blocks and prefixes handed on at once, a pool that is too small."""
    recorder, rng = DraftRecorder(monkeypatch), np.random.default_rng(4)
    small = {"block_size": 4, "max_num_batched_tokens": 24, "kv_cache_memory": 26 * block_bytes(folder)}
    engine = defer(make_engine(folder, **small), max_in_flight=3, ahead=False)
    stopping = replace(greedy(30), stop_token_ids=list(range(0, 300, 6)))
    for i in range(16):
        engine.add_request(GenerationRequest(f"{i}", PROMPT[i % 3 : 3 + 2 * i], stopping if i % 2 else greedy(12)))
    while engine.has_work:
        engine.step()
        if rng.random() < 0.2:
            engine.abort_request(str(rng.integers(16)))
    stats = engine.stats()
    assert min(stats["num_aborted"], stats["num_finished"] - 2, stats["num_preemptions"]) > 0
    assert stats["num_prefix_hit_tokens"] > 0
    assert stats["num_drafter_faults"] == 0
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_rows_that_wait_behind_a_failed_step_keep_their_places(folder, monkeypatch):
    """They end where the slot's computed tokens do: a step that failed counts without its last row."""
    engine = make_engine(folder)
    worker = engine.executor.worker
    verify = worker.verifier.verify

    def failing(logits, batch, drafts):
        verdict = verify(logits, batch, drafts)
        verdict.failed[:] = True
        verdict.num_emitted[:] = verdict.num_accepted[:] = 0
        return verdict

    monkeypatch.setattr(worker.verifier, "verify", failing)
    (output,) = engine.generate(PROMPT[:12], greedy(), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert worker.state.num_computed_tokens[0] == 11
    assert worker.proposer._held.num_new[0] == 11


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_answers_to_one_token(max_tokens, folder):
    """D15: no room for a draft, for one, for two, behind a prompt that leaves the modules a single row."""
    engine = make_engine(folder)
    plain = make_engine(folder, speculative_config=None)
    outputs = [e.generate([[9], [9, 8]], greedy(max_tokens), use_tqdm=False) for e in (engine, plain)]
    ours, expected = ([output.outputs[0].token_ids for output in each] for each in outputs)
    assert ours == expected
    assert engine.stats()["num_drafter_faults"] == 0
    assert (engine.stats()["num_drafted"] > 0) == (max_tokens == 3)


@pytest.mark.parametrize(
    ("num_modules", "k", "limit", "warned"),
    [(1, 3, 3, True), (3, 3, 3, False), (2, 3, 3, True), (3, None, 3, False), (1, 1, 1, False)],
)
def test_how_many_drafts_of_how_many_modules(num_modules, k, limit, warned, tiny_checkpoint, caplog):
    """E08: modules are used again beyond their number, which is said once; left out, k is found out step by step."""
    speculative = {"method": "mtp"} | ({} if k is None else {"num_speculative_tokens": k})
    folder = tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=num_modules)
    engine = make_engine(folder, speculative_config=speculative)
    engine.generate([[9, 8, 7], [5]], greedy(), use_tqdm=False)
    assert engine.config.speculative_config.draft_limit == engine.stats()["num_speculative_tokens"] == limit
    messages = [
        r.getMessage() for r in caplog.records if r.name == "app.speculative.mtp" and r.levelno == logging.WARNING
    ]
    assert (
        messages
        == [f"{limit} drafts of {num_modules} MTP module(s): later ones re-use the modules, at lower acceptance"]
        * warned
    )
