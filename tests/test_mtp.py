"""Drafts of MTP modules equal the report's equations at every step of random schedules, and no schedule loses any."""

import functools
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from tests.helpers.mtp_reference import DraftRecorder, MTPReference, poison

MAX_MODEL_LEN = 64
MAX_TOKENS = 9
TOLERANCE = 4e-4  # in fp32, up to seven passes of a module behind one another


@dataclass(frozen=True)
class Schedule:
    num_modules: int
    k: int
    block_size: int = 8
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 4
    num_blocks: int | None = None  # None: enough for all
    pauses: bool = False  # drafting is turned off and on again, and some requests never want it
    architecture: str = "deepseek_v3"
    hidden_is_normed: bool = True
    recycled_is_normed: bool = True

    @property
    def states(self) -> dict[str, bool]:
        return {"hidden_is_normed": self.hidden_is_normed, "recycled_is_normed": self.recycled_is_normed}


SCHEDULES = {
    "one module": Schedule(1, 1),
    "one module, used again, in small chunks": Schedule(1, 4, block_size=4, max_num_batched_tokens=7),
    "one module, preempted": Schedule(1, 3, num_blocks=8),
    "one module, on and off": Schedule(1, 2, block_size=1, max_num_batched_tokens=9, pauses=True),
    "two modules": Schedule(2, 2, block_size=16),
    "two modules, used again, in small chunks": Schedule(2, 5, max_num_batched_tokens=9),
    "two modules, preempted, on and off": Schedule(2, 3, block_size=4, num_blocks=17, pauses=True),
    "three modules, alone": Schedule(3, 3, block_size=1, max_num_seqs=1),
    "three modules, used again and again": Schedule(3, 7, block_size=2, max_num_batched_tokens=19),
    "three modules, preempted, in chunks": Schedule(
        3, 4, block_size=4, max_num_batched_tokens=11, max_num_seqs=6, num_blocks=16, pauses=True
    ),
    "YaRN": Schedule(2, 3, max_num_batched_tokens=19, architecture="deepseek_v3_yarn"),
    "one module, states before the norms": Schedule(1, 3, hidden_is_normed=False, recycled_is_normed=False),
    "two modules, the target's states before the norm": Schedule(2, 5, hidden_is_normed=False),
}


def make_prompts() -> list[list[int]]:
    """One and two tokens, around block ends, the context's edge; two share 32 tokens, and one comes twice."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 2, 3, 8, 17, 33, MAX_MODEL_LEN - 3)]
    return [*prompts, [*prompts[5][:32], (prompts[5][32] + 1) % 300, 7], prompts[4]]


PROMPTS = make_prompts()


def make_engine(folder, schedule: Schedule, **fields) -> LLMEngine:
    sizes = {}
    if schedule.num_blocks is not None:
        token_bytes = 4 * 40 * (2 + schedule.num_modules)  # fp32; 32 of the latent and 8 that are rotated, a layer
        sizes["kv_cache_memory"] = schedule.num_blocks * schedule.block_size * token_bytes
    return LLMEngine(
        model=str(folder),
        dtype="float32",
        device="cpu",
        progress=False,
        max_model_len=MAX_MODEL_LEN,
        block_size=schedule.block_size,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        speculative_config={"method": "mtp", "num_speculative_tokens": schedule.k, **schedule.states},
        **sizes | fields,
    )


@functools.cache
def continuations_of(folder: Path) -> list[list[int]]:
    """Of the prompts, greedy, alone and plain."""
    engine = LLMEngine(
        model=str(folder), dtype="float32", device="cpu", progress=False,
        max_model_len=MAX_MODEL_LEN, max_num_seqs=1, enable_prefix_caching=False,
    )  # fmt: skip
    outputs = engine.generate(PROMPTS, params(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def continuations(tiny_checkpoint) -> list[list[int]]:
    """The same whatever modules stand behind the target."""
    return continuations_of(tiny_checkpoint("deepseek_v3"))


def params(**fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, **fields)


def mixed_script(continuations: list[list[int]], seed: int):
    """Drafts what the target will say two times in three, else anything."""
    texts = [prompt + continuation for prompt, continuation in zip(PROMPTS, continuations, strict=True)]
    rng = np.random.default_rng(seed)

    def script(known: list[int], drafts: list[int]) -> int | None:
        begun = known + drafts
        following = [text[len(begun)] for text in texts if len(text) > len(begun) and text[: len(begun)] == begun]
        if following and rng.random() < 0.67:
            return following[0]
        return int(rng.integers(3, 300)) if rng.random() < 0.5 else None

    return script


def run(engine: LLMEngine, schedule: Schedule, rng: np.random.Generator) -> list[list[int]]:
    """All prompts, some of them later than others; ids in their order."""
    token_ids: list[list[int]] = [[] for _ in PROMPTS]
    arrivals = iter(range(len(PROMPTS)))
    for index in islice(arrivals, 3):
        _add(engine, index, schedule, rng)
    while engine.has_work:
        poison(engine)
        for delta in engine.step():
            token_ids[int(delta.request_id.split("-")[1])].extend(delta.token_ids)
        if rng.random() < 0.4:
            for index in islice(arrivals, 1):
                _add(engine, index, schedule, rng)
        if not engine.has_work:
            for index in islice(arrivals, 2):
                _add(engine, index, schedule, rng)
        if schedule.pauses and rng.random() < 0.3:
            engine.set_num_speculative_tokens(int(rng.choice([0, 1, schedule.k])))
    return token_ids


def _add(engine: LLMEngine, index: int, schedule: Schedule, rng: np.random.Generator) -> None:
    own = int(rng.choice([0, schedule.k])) if schedule.pauses and rng.random() < 0.3 else None
    engine.add_request(GenerationRequest(f"prompt-{index}", PROMPTS[index], params(num_speculative_tokens=own)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_draft_logits_are_those_of_the_equations(name, tiny_checkpoint, monkeypatch):
    schedule, seed = SCHEDULES[name], list(SCHEDULES).index(name)
    continuations = continuations_of(tiny_checkpoint(schedule.architecture))
    folder = tiny_checkpoint(schedule.architecture, num_nextn_predict_layers=schedule.num_modules)
    recorder = DraftRecorder(monkeypatch, mixed_script(continuations, seed))
    engine, rng = make_engine(folder, schedule), np.random.default_rng(seed)
    for _ in range(2):  # the second time from the prefix cache
        assert run(engine, schedule, rng) == continuations
    stats = engine.stats()
    assert stats["num_drafter_faults"] == 0
    assert 0 < stats["num_accepted"] < stats["num_drafted"] == len(recorder.steps)
    assert stats["num_prefix_hit_tokens"] > 0
    assert (stats["num_preemptions"] > 0) == (schedule.num_blocks is not None)
    differences = recorder.differences(MTPReference(folder, **schedule.states))
    assert {len_drafts for _, len_drafts in differences} == set(range(schedule.k))
    assert {place: value for place, value in differences.items() if value > TOLERANCE} == {}
