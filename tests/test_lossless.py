"""Greedy and seeded text is the plain one, whatever drafts, batch mates, chunks, preemptions and cache hits do."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from app.engine.plan import StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.llm_engine import LLMEngine
from app.speculative.proposer import Drafts
from app.speculative.registry import PROPOSERS
from kernels import ops
from models.loader import load_model

# In bf16 near ties are many, and equal texts need rows whose bits do not depend on the rows beside them.
DTYPES = ["float32", *(["bfloat16"] if ops.is_row_invariant(torch.zeros(1, dtype=torch.bfloat16)) else [])]
ARCHITECTURES = ["llama", "llama3", "llama_tied", "qwen2", "qwen3", "mistral", "mistral_full", "deepseek_v3"]
MTP_ARCHITECTURES = ["deepseek_v3"]
MAX_TOKENS = 24
MAX_MODEL_LEN = 96
BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """Eight prompts of 1 to 40 tokens; half repeat themselves, so that lookup has something to find."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 7, 8, 17, 24, 33, 40]
    prompts = [rng.integers(3, 250, length).tolist() for length in lengths]
    return [(prompt[:5] * 9)[: len(prompt)] if i % 2 else prompt for i, prompt in enumerate(prompts)]


PROMPTS = make_prompts()


def speculative_config(method: str, tiny_checkpoint, architecture: str) -> dict | None:
    """A configuration of each registered method on `architecture`; a new method must add itself here."""
    configs = {
        "suffix": {},
        "suffix_with_memory": {"method": "suffix", "memory_bytes": 2**20},
        "ngram": {"min_n": 1, "max_n": 3},
        "draft_model": {"model": str(tiny_checkpoint(architecture, num_hidden_layers=1))},
        "perfect_draft_model": {"method": "draft_model", "model": str(tiny_checkpoint(architecture))},
        "mtp": {},
    }
    return {"method": method, "num_speculative_tokens": 3, **configs[method]}


def target(method: str, tiny_checkpoint, architecture: str) -> Path:
    """The checkpoint of `architecture`; for MTP the same weights with two modules behind them."""
    return tiny_checkpoint(architecture, **({"num_nextn_predict_layers": 2} if method == "mtp" else {}))


METHODS = [*PROPOSERS, "suffix_with_memory", "perfect_draft_model"]
PAIRS = [
    (architecture, method)
    for architecture in ARCHITECTURES
    for method in METHODS
    if method != "mtp" or architecture in MTP_ARCHITECTURES
]
ONE_PAIR_A_METHOD = [("deepseek_v3" if method == "mtp" else "llama", method) for method in METHODS]

SCENARIOS = {
    "alone": {"max_num_seqs": 1, "num_blocks": 96},
    "batch": {"max_num_seqs": 8},
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 11},
    "preempted": {"max_num_seqs": 8, "num_blocks": 26},
    "uncached": {"max_num_seqs": 4, "enable_prefix_caching": False},
}


def make_engine(
    folder, speculative: dict | None, *, num_blocks: int | None = None, dtype: str = "float32", **fields
) -> LLMEngine:
    sizes = {"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE, "max_num_seqs": 8, "dtype": dtype, **fields}
    if num_blocks is not None:
        folders = [folder] + ([speculative["model"]] if speculative and "model" in speculative else [])
        with_modules = speculative is not None and speculative["method"] == "mtp"
        token_bytes = sum(kv_bytes(Path(name), getattr(torch, dtype), with_modules) for name in folders)
        sizes["kv_cache_memory"] = num_blocks * BLOCK_SIZE * token_bytes
    return LLMEngine(model=str(folder), device="cpu", speculative_config=speculative, progress=False, **sizes)


def kv_bytes(folder: Path, dtype: torch.dtype, with_modules: bool) -> int:
    """Bytes of KV a token, of all layers and of the modules behind them."""
    model = load_model(folder, dtype, torch.device("cpu"), progress=False)
    specs = model.kv_specs()
    num_modules = model.config.num_nextn_predict_layers if with_modules else 0
    return sum(spec.token_bytes for spec in specs + specs[:1] * num_modules)


def run(engine: LLMEngine, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_drafter_faults"] == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny_checkpoint):
    """Greedy ids of each architecture, one prompt at a time, nothing speculated or cached."""
    known: dict[tuple[str, str], list[list[int]]] = {}

    def plain_ids(architecture: str, dtype: str = "float32") -> list[list[int]]:
        if (architecture, dtype) not in known:
            fields = {"dtype": dtype, "max_num_seqs": 1, "enable_prefix_caching": False}
            known[architecture, dtype] = run(make_engine(tiny_checkpoint(architecture), None, **fields), GREEDY)
        return known[architecture, dtype]

    return plain_ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("architecture", "method"), PAIRS)
def test_greedy_ids_equal_plain_decoding(architecture, method, scenario, dtype, plain, tiny_checkpoint):
    speculative = speculative_config(method, tiny_checkpoint, architecture)
    folder = target(method, tiny_checkpoint, architecture)
    engine = make_engine(folder, speculative, dtype=dtype, **SCENARIOS[scenario])
    assert run(engine, GREEDY) == plain(architecture, dtype)
    first = engine.stats()
    assert run(engine, GREEDY) == plain(architecture, dtype), "the second run, with what the prefix cache holds"
    assert first["num_drafted"] > 0
    if scenario == "preempted":
        assert first["num_preemptions"] > 0
    if engine.config.enable_prefix_caching and scenario != "preempted":
        assert engine.stats()["num_prefix_hit_tokens"] > first["num_prefix_hit_tokens"]


def test_a_perfect_drafter_is_always_accepted_whatever_the_schedule(tiny_checkpoint):
    """Stale, missing or shifted drafter KV would leave the text right and show here alone."""
    for scenario in SCENARIOS:
        speculative = speculative_config("perfect_draft_model", tiny_checkpoint, "llama")
        engine = make_engine(tiny_checkpoint("llama"), speculative, **SCENARIOS[scenario])
        for _ in range(2):
            run(engine, GREEDY)
        stats = engine.stats()
        assert stats["num_accepted"] == stats["num_drafted"] > 0, scenario


class ArbitraryProposer:
    """Drafts true continuations, wrong ones and mixtures, in ragged lengths."""

    def __init__(self, prompts: list[list[int]], continuations: list[list[int]], seed: int) -> None:
        self._texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        self._rng = np.random.default_rng(seed)

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Nothing to compute."""

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        rows, lengths = [], []
        for scheduled in plan.scheduled:
            num_tokens = int(state.num_tokens[scheduled.slot])
            known = state.token_ids[scheduled.slot, :num_tokens].tolist()
            k = int(self._rng.integers(0, scheduled.num_draft_tokens + 1))
            text = next((text for text in self._texts if text[:num_tokens] == known), [])
            right = text[num_tokens : num_tokens + k]
            row = np.array(right + [5] * (k - len(right)), dtype=np.int64)
            if k and self._rng.random() < 0.5:
                row[self._rng.integers(0, k) :] = self._rng.integers(3, 250)
            rows.append(row)
            lengths.append(k)
        token_ids = np.zeros((len(rows), max(lengths, default=0)), dtype=np.int64)
        for i, row in enumerate(rows):
            token_ids[i, : len(row)] = row
        return Drafts(token_ids, np.array(lengths, dtype=np.int64))

    def observe(self, batch, hidden_states, verdict) -> None:
        """Nothing to remember."""

    def reset(self) -> None:
        """Nothing to forget."""


@pytest.mark.parametrize("seed", range(4))
def test_arbitrary_drafts_never_change_greedy_text(seed, plain, tiny_checkpoint):
    speculative = {"method": "ngram", "num_speculative_tokens": 5}
    engine = make_engine(tiny_checkpoint("llama"), speculative, max_num_batched_tokens=13, num_blocks=40)
    engine.executor.worker.proposer = ArbitraryProposer(PROMPTS, plain("llama"), seed)
    assert run(engine, GREEDY) == plain("llama")
    stats = engine.stats()
    assert 0 < stats["num_accepted"] < stats["num_drafted"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "method"), ONE_PAIR_A_METHOD)
def test_the_controller_never_changes_greedy_text(architecture, method, dtype, plain, tiny_checkpoint):
    speculative = speculative_config(method, tiny_checkpoint, architecture) | {"num_speculative_tokens": "auto"}
    for scenario in ("batch", "chunked", "preempted"):
        folder = target(method, tiny_checkpoint, architecture)
        engine = make_engine(folder, speculative, dtype=dtype, **SCENARIOS[scenario])
        assert run(engine, GREEDY) == plain(architecture, dtype)
        assert run(engine, GREEDY) == plain(architecture, dtype), "the second run, with what is remembered"
        assert engine.stats()["controller_num_decisions"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "method"), ONE_PAIR_A_METHOD)
def test_a_seed_decides_the_text_alone(architecture, method, dtype, tiny_checkpoint):
    """Coupled verification: the same ids with any drafter, any k, any batch mates, and none of them."""
    folder = target(method, tiny_checkpoint, architecture)
    params = [
        SamplingParams(
            temperature=0.7 + 0.1 * i,
            top_p=0.9,
            top_k=20 * (i % 2),
            seed=1000 + i,
            presence_penalty=0.5 * (i % 3),
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]
    expected = run(make_engine(folder, None, dtype=dtype, max_num_seqs=1), params)
    speculative = speculative_config(method, tiny_checkpoint, architecture)
    for k, scenario in ((1, "batch"), (3, "chunked"), (4, "preempted"), ("auto", "batch")):
        engine = make_engine(folder, {**speculative, "num_speculative_tokens": k}, dtype=dtype, **SCENARIOS[scenario])
        assert run(engine, params) == expected, (k, scenario)
    some_off = [replace(p, num_speculative_tokens=0) if i % 2 else p for i, p in enumerate(params)]
    assert run(make_engine(folder, speculative, dtype=dtype), some_off) == expected
