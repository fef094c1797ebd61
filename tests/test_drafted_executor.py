"""Drafts that are made elsewhere: the same texts, the same acceptance, whatever fails there."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.config import AppConfig
from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.engine_config import EngineConfig
from app.llm_engine import LLMEngine
from tests.helpers.drafted_engine import ScriptedDrafter, drafted
from tests.test_lossless import (
    BLOCK_SIZE,
    GREEDY,
    MAX_MODEL_LEN,
    PROMPTS,
    SCENARIOS,
    kv_bytes,
    make_engine,
    run,
    speculative_config,
)

METHODS = ["suffix", "suffix_with_memory", "ngram", "draft_model", "perfect_draft_model"]
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
MIXED = [replace(SEEDED, seed=i, presence_penalty=0.3) if i % 2 else GREEDY for i in range(len(PROMPTS))]


def speculating(method: str, tiny_checkpoint, k: int | str = 3, **fields) -> dict:
    return {**speculative_config(method, tiny_checkpoint, "llama"), "num_speculative_tokens": k, **fields}


def away(
    method: str,
    tiny_checkpoint,
    scenario: str = "batch",
    k: int | str = 3,
    num_microbatches: int = 2,
    verification: str = "auto",
    **fields,
) -> tuple[LLMEngine, ScriptedDrafter]:
    """As `make_engine` sizes it, with the drafts made elsewhere."""
    options = {"placement": "actor", "num_microbatches": num_microbatches, "verification": verification}
    speculative = speculating(method, tiny_checkpoint, k, **options)
    sizes = {"max_num_seqs": 8, **SCENARIOS[scenario], **fields}
    folder = tiny_checkpoint("llama")
    if (num_blocks := sizes.pop("num_blocks", None)) is not None:
        folders = [folder, speculative["model"]] if "model" in speculative else [folder]
        token_bytes = sum(kv_bytes(Path(each), torch.float32, False) for each in folders)
        sizes["kv_cache_memory"] = num_blocks * BLOCK_SIZE * token_bytes
    return drafted(
        EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            speculative_config=speculative,
            **sizes,
        )
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("scenario", ["alone", "chunked", "preempted"])
@pytest.mark.parametrize("method", METHODS)
def test_texts_and_acceptance_are_those_of_inline_drafts(method, scenario, num_microbatches, tiny_checkpoint):
    inline = make_engine(tiny_checkpoint("llama"), speculating(method, tiny_checkpoint), **SCENARIOS[scenario])
    engine, _ = away(method, tiny_checkpoint, scenario, num_microbatches=num_microbatches)
    assert engine.stats()["num_blocks"] == inline.stats()["num_blocks"], "the drafter's KV takes its part of the pool"
    for _ in range(2):  # the second time with what the prefix cache holds
        assert run(engine, MIXED) == run(inline, MIXED)
    stats, expected = engine.stats(), inline.stats()
    assert stats["num_drafted"] > 0
    assert (stats["num_preemptions"] > 0) == (scenario == "preempted")
    if method == "perfect_draft_model":
        assert stats["num_accepted"] == stats["num_drafted"], "KV that is stale, missing or shifted"
    elif scenario == "alone" or (scenario, num_microbatches) == ("chunked", 1):
        assert stats["num_accepted"] == expected["num_accepted"]


def test_distributions_come_with_drafts_where_rejection_is_asked_for(tiny_checkpoint):
    speculative = speculating("draft_model", tiny_checkpoint, verification="rejection")
    inline = make_engine(tiny_checkpoint("llama"), speculative, **SCENARIOS["alone"])
    engine, _ = away("draft_model", tiny_checkpoint, "alone", verification="rejection")
    assert run(engine, SEEDED) == run(inline, SEEDED)
    assert engine.stats()["num_accepted"] == inline.stats()["num_accepted"] > 0
    speculative = AppConfig.model_validate({"model": "a/b", "speculative_config": {"method": "ngram"}})
    assert speculative.speculative_config.verification_mode == "auto", "ids alone are only a draft actor's"


@pytest.mark.parametrize("method", ["suffix", "ngram", "draft_model"])
def test_chosen_draft_lengths_change_nothing(method, tiny_checkpoint):
    expected = run(make_engine(tiny_checkpoint("llama"), None), MIXED)
    engine, _ = away(method, tiny_checkpoint, k="auto")
    for _ in range(3):
        assert run(engine, MIXED) == expected
    stats = engine.stats()
    assert stats["controller_num_decisions"] > 0
    allowed = stats["num_drafted"] + sum(value for name, value in stats.items() if name.startswith("num_refused"))
    assert stats["num_refused_fault"] == 0
    assert allowed > 0


def test_sequences_take_turns_while_there_is_something_to_draft(tiny_checkpoint):
    engine, _ = away("perfect_draft_model", tiny_checkpoint)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(GenerationRequest(str(i), prompt, replace(GREEDY, max_tokens=40)))
    engine.step()
    sizes = []
    for _ in range(6):
        engine.step()
        sizes.append([len(plan.scheduled) for plan, _ in engine._in_flight])
        slots = [scheduled.slot for plan, _ in engine._in_flight for scheduled in plan.scheduled]
        assert len(slots) == len(set(slots)), "in one plan at a time"
    assert sizes[-1] == [4]
    engine.set_num_speculative_tokens(0)
    while engine.executor.num_microbatches == 2:
        engine.step()
    engine.step()
    engine.step()
    assert engine.scheduler.schedule(1) is not None
    engine.shutdown()


@pytest.mark.parametrize("num_starting", [0, 3])
@pytest.mark.parametrize("method", ["suffix_with_memory", "ngram", "perfect_draft_model"])
def test_a_drafter_that_fails_is_started_anew_and_goes_on_from_what_is_known(method, num_starting, tiny_checkpoint):
    expected = run(make_engine(tiny_checkpoint("llama"), None), MIXED)
    engine, drafter = away(method, tiny_checkpoint)
    token_ids: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(GenerationRequest(str(i), prompt, MIXED[i]))
        token_ids[str(i)] = []
    drafter.num_starting = num_starting
    num_steps = 0
    while engine.has_work:
        for delta in engine.step():
            token_ids[delta.request_id] += delta.token_ids
        num_steps += 1
        drafter.fails = drafter.fails or num_steps in (5, 9)
    assert list(token_ids.values()) == expected
    stats = engine.stats()
    assert stats["num_drafter_restarts"] == drafter.num_restarts
    assert 1 <= drafter.num_restarts <= stats["num_drafter_faults"]
    assert stats["num_refused_fault"] > 0
    if method == "perfect_draft_model":
        assert stats["num_accepted"] == stats["num_drafted"] > 0
        assert stats["num_refused_proposer"] == 0, "what a drafter that is away does not make is the fault's"
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_a_drafter_that_is_late_or_loading_is_not_held_against_drafts(tiny_checkpoint, monkeypatch):
    """Ten seconds that it was waited for in vain say nothing of drafts to come; while it is away none are planned."""
    engine, drafter = away("perfect_draft_model", tiny_checkpoint, "alone", k="auto")
    controller, worker = engine.executor._controller, engine.executor._executor.worker
    step, has_drafts, was_late = worker.speculative_step, [], []

    def wait_in_vain(plan):
        result = step(plan)
        has_drafts.append(plan.num_draft_tokens > 0)
        was_late.append(result.drafter_fault is not None)
        if was_late[-1]:
            result.timings.propose_s = 10.0
        return result

    monkeypatch.setattr(worker, "speculative_step", wait_in_vain)
    engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    drafter.fails, drafter.num_starting = True, 1000
    while not any(was_late):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    while engine.executor._is_up:
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    num_before = len(has_drafts)
    engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not any(has_drafts[num_before:])
    assert controller._earned.ratio > 0.9
    assert controller.totals.exploration_s < 1.0
    assert controller.totals.total_s < 10.0
    drafter.num_starting = 0
    num_before = len(has_drafts)
    while not any(has_drafts[num_before:]):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.stats()["num_refused_fault"] > 0


@pytest.mark.parametrize("method", ["suffix_with_memory", "perfect_draft_model"])
def test_aborts_take_nothing_from_those_that_stay(method, tiny_checkpoint):
    expected = run(make_engine(tiny_checkpoint("llama"), None), MIXED)
    rng = random.Random(5)
    engine, _ = away(method, tiny_checkpoint, "chunked", num_blocks=30)
    token_ids: dict[str, list[int]] = {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        for name in (f"stays-{i}", f"goes-{i}"):
            engine.add_request(GenerationRequest(name, prompt, params))
            token_ids[name] = []
    while engine.has_work:
        for delta in engine.step():
            token_ids[delta.request_id] += delta.token_ids
        if rng.random() < 0.3:
            engine.abort_request(f"goes-{rng.randrange(len(PROMPTS))}")
    for i, own in enumerate(expected):
        assert token_ids[f"stays-{i}"] == own
    stats = engine.stats()
    assert stats["num_aborted"] > 4
    assert stats["num_drafter_faults"] == 0
    if method == "perfect_draft_model":
        assert stats["num_accepted"] == stats["num_drafted"] > 0
    assert stats["num_free_blocks"] == stats["num_blocks"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "mtp", "placement": "actor"}, "mtp reads hidden states on the devices of the target's ranks"),
        ({"method": "ngram", "num_microbatches": 2}, "means nothing without a draft actor"),
        (
            {"method": "draft_model", "model": "a/b", "placement": "actor", "draft_tensor_parallel_size": 2},
            "a draft actor is one process",
        ),
        ({"method": "ngram", "placement": "actor", "draft_timeout_s": 60}, "draft_timeout_s is 60, and step_timeout_s"),
        ({"method": "ngram", "placement": "beside"}, "placement"),
    ],
)
def test_placements_that_can_not_be_are_refused_in_a_sentence(fields, message):
    size = fields.get("draft_tensor_parallel_size", 1)
    with pytest.raises(ValueError, match=message):
        AppConfig.model_validate({"model": "some/model", "tensor_parallel_size": size, "speculative_config": fields})


def test_options_of_no_draft_actor_are_refused():
    with pytest.raises(ValueError, match="draft_actor_options is given, and no draft actor"):
        AppConfig.model_validate({"model": "a/b", "deployment_config": {"draft_actor_options": {"num_cpus": 1}}})


def test_an_engine_outside_ray_has_no_draft_actor(tiny_checkpoint):
    with pytest.raises(ValueError, match="an engine outside Ray Serve has no actors"):
        make_engine(tiny_checkpoint("llama"), speculating("ngram", tiny_checkpoint, placement="actor"))
