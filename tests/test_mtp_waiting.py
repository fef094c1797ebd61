"""Rows of steps without drafts wait, and are run together: none is lost, and none is run one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.speculative.held_rows import HeldRows, SlotRows
from tests.helpers.mtp_reference import DraftRecorder, MTPReference, poison

TOLERANCE = 2e-4
BLOCK_SIZE = 8
PROMPT = np.random.default_rng(2).integers(3, 300, 21).tolist()


@pytest.fixture(scope="module", params=[1, 2])
def folder(request, tiny_checkpoint):
    return tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=request.param)


def make_engine(folder, **fields) -> LLMEngine:
    engine = LLMEngine(
        model=str(folder),
        dtype="float32",
        device="cpu",
        progress=False,
        max_model_len=96,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        **fields,
    )
    engine.set_num_speculative_tokens(0)
    return engine


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def generate(engine: LLMEngine, prompt: list[int], max_tokens: int) -> list[int]:
    return engine.generate(prompt, greedy(max_tokens), use_tqdm=False)[0].outputs[0].token_ids


def count_passes(engine: LLMEngine, monkeypatch) -> list[int]:
    """Rows of every pass of the first module from now on."""
    proposer, passes = engine.executor.worker.proposer, []
    run = proposer._run

    def counted(module, slots, rows, token_ids, hidden_states):
        if module == 0:
            passes.append(len(token_ids))
        return run(module, slots, rows, token_ids, hidden_states)

    monkeypatch.setattr(proposer, "_run", counted)
    return passes


def test_steps_without_drafts_share_a_pass(folder, monkeypatch):
    engine = make_engine(folder)
    passes = count_passes(engine, monkeypatch)
    generate(engine, PROMPT, 4 * BLOCK_SIZE)
    assert len(passes) == 4, "the prompt's, then one a block"
    assert min(passes) >= BLOCK_SIZE


def test_drafting_starts_where_rows_have_waited(folder, monkeypatch):
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    for i in range(3):
        engine.add_request(GenerationRequest(f"{i}", PROMPT[4 * i :], greedy(20)))
    for _ in range(7):
        engine.step()
    assert recorder.steps == []
    engine.set_num_speculative_tokens(2)
    while engine.has_work:
        poison(engine)
        engine.step()
    assert len(recorder.steps) > 30
    assert engine.stats()["num_drafter_faults"] == 0
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_an_answer_without_drafts_leaves_blocks_to_draft_from(folder, monkeypatch):
    """C07: its last whole block was completed by rows that waited when it left."""
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    for num_new in range(BLOCK_SIZE, 2 * BLOCK_SIZE):
        text = PROMPT[num_new - BLOCK_SIZE :] + generate(engine, PROMPT[num_new - BLOCK_SIZE :], num_new)
        poison(engine)
        engine.set_num_speculative_tokens(2)
        before = engine.stats()["num_prefix_hit_tokens"], len(recorder.steps)
        generate(engine, [*text, 5, 6], 4)
        assert engine.stats()["num_prefix_hit_tokens"] - before[0] >= len(text) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        assert len(recorder.steps) > before[1], "the hit was not whole"
        engine.set_num_speculative_tokens(0)
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_a_running_answers_blocks_are_whole_for_who_joins(folder, monkeypatch):
    recorder = DraftRecorder(monkeypatch)
    engine = make_engine(folder)
    answer = generate(make_engine(folder), PROMPT, 20)
    engine.add_request(GenerationRequest("first", PROMPT, greedy(24)))
    for _ in range(1 + 13):  # 33 tokens have been computed, 29 of them run over
        engine.step()
    engine.set_num_speculative_tokens(2)
    engine.add_request(GenerationRequest("second", [*PROMPT, *answer[:15], 7], greedy(6)))
    while engine.has_work:
        engine.step()
    assert engine.stats()["num_prefix_hit_tokens"] == 32
    assert any(step.known[: len(PROMPT) + 16] == [*PROMPT, *answer[:15], 7] for step in recorder.steps)
    assert max(recorder.differences(MTPReference(folder)).values()) < TOLERANCE


def test_rows_that_wait_fit_a_step(folder, monkeypatch):
    """Four sequences hold seven rows each at most, and a pass has never more rows than a step may have."""
    engine = make_engine(folder, max_num_batched_tokens=16)
    passes = count_passes(engine, monkeypatch)
    for i in range(6):
        engine.add_request(GenerationRequest(f"{i}", PROMPT[: 3 + i], greedy(20)))
    while engine.has_work:
        engine.step()
    kept = engine.executor.worker.proposer._modules.num_modules - 1
    assert max(passes) <= 16 + 4 * kept


def test_who_is_given_up_has_no_pass_and_the_same_text(folder, monkeypatch):
    """The others go on to be drafted for, and the slot's next sequence again."""
    engine = make_engine(folder)
    passes, worker = count_passes(engine, monkeypatch), engine.executor.worker
    wanted = [generate(engine, PROMPT[4 * i :], 20) for i in range(2)]
    engine.set_num_speculative_tokens(2)
    propose, given_up, drafted = worker.proposer.propose, [], {}

    def forgetful(state, plan):
        plan = replace(plan, given_up_slots=[slot for slot in given_up if state.num_tokens[slot]])
        drafts = propose(state, plan)
        for scheduled, num_tokens in zip(plan.scheduled, drafts.num_tokens.tolist(), strict=True):
            drafted[scheduled.slot] = drafted.get(scheduled.slot, 0) + num_tokens
        return drafts

    monkeypatch.setattr(worker.proposer, "propose", forgetful)
    for slots, has_passes in (([0], True), ([0, 1], False), ([], True)):
        given_up[:] = slots
        drafted.clear()
        passes.clear()
        prompts = [PROMPT[4 * i :] for i in range(2)]
        outputs = engine.generate(prompts, greedy(20), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert bool(passes) == has_passes
        assert [drafted[slot] > 0 for slot in (0, 1)] == [slot not in slots for slot in (0, 1)]
    assert engine.stats()["num_drafter_faults"] == 0


def test_held_rows_come_back_slot_by_slot():
    held = HeldRows(4)

    def rows(**values: list[float]) -> SlotRows:
        states = torch.tensor([value for of_slot in values.values() for value in of_slot])[:, None]
        slots = np.array([int(name[1:]) for name in values])
        return SlotRows(states, slots, np.array([len(of_slot) for of_slot in values.values()]))

    def taken(num_kept: int) -> dict[int, list[float]]:
        all_rows = held.take(num_kept)
        parts = all_rows.hidden_states[:, 0].split(all_rows.num_rows.tolist())
        return {slot: part.tolist() for slot, part in zip(all_rows.slots.tolist(), parts, strict=True)}

    held.add(rows(s2=[20, 21], s0=[0]))
    held.add(rows(s0=[1], s1=[10], s2=[22]))
    assert held.num_new.tolist() == [2, 1, 3, 0]
    held.drop([1, 3])
    assert taken(num_kept=1) == {0: [0, 1], 2: [20, 21, 22]}
    assert not held.num_new.any()
    held.add(rows(s0=[2]))
    assert held.num_new.tolist() == [1, 0, 0, 0]
    assert taken(num_kept=2) == {0: [1, 2], 2: [22]}
    held.drop([0])
    held.add(rows(s3=[3, 4], s1=[5]))
    assert taken(num_kept=0) == {2: [22], 3: [3, 4], 1: [5]}
    held.add(rows(s3=[6]))
    held.drop([3])
    assert not held.num_new.any()
    held.add(rows(s3=[7]))
    assert taken(num_kept=0) == {3: [7]}
