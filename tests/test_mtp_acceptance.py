"""What the engine accepts on held-out text with the checkpoint that ships: defects of a drafter show here alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.speculative.mtp import MTPProposer

FOLDER = Path(__file__).parent / "assets" / "tiny-deepseek-v3"
HELD_OUT = json.loads((FOLDER / "heldout.json").read_text(encoding="utf-8"))
PROMPTS = HELD_OUT["prompt_ids"]
TOLERANCE = 0.01  # of a position's rate: eight of 800 verifications, where ties fall another way


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Layers this small lose by a second one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_engine(k: int) -> LLMEngine:
    return LLMEngine(
        model=str(FOLDER),
        dtype="float32",
        device="cpu",
        max_model_len=256,
        max_num_seqs=8,
        progress=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": k} if k else None,
    )


def generate(engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 96) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]


def rates(engine: LLMEngine) -> list[float]:
    """By position, of the drafts that were made there."""
    stats = engine.stats()
    pairs = zip(stats["accepted_per_position"], stats["drafted_per_position"], strict=True)
    return [accepted / drafted for accepted, drafted in pairs]


def test_acceptance_is_what_full_recomputation_accepts():
    """Golden figures of `heldout.json`, which were counted without KV, batches or this engine."""
    figures, engine = HELD_OUT["figures"], make_engine(3)
    token_ids = dict(zip(map(tuple, PROMPTS), generate(engine, PROMPTS), strict=True))
    for one in HELD_OUT["golden"]:
        assert token_ids[tuple(one["prompt_ids"])] == one["output_ids"]
    assert rates(engine) == pytest.approx(figures["acceptance_rates"], abs=TOLERANCE)
    # A verification of fewer than three drafts, at an answer's end, is not among the figures.
    stats = engine.stats()
    assert stats["drafted_per_position"][2] == pytest.approx(figures["num_verifications"], rel=TOLERANCE)
    assert stats["num_drafter_faults"] == 0
    assert rates(engine)[0] >= 0.6
    assert stats["mean_acceptance_length"] >= 1.8, "the prompts' own steps, which draft nothing, included"


def test_text_is_that_of_plain_decoding_and_of_transformers():
    prompts = [one["prompt_ids"] for one in HELD_OUT["golden"][:3]]  # they stay clear of ties
    plain = generate(make_engine(0), prompts, 32)
    assert generate(make_engine(3), prompts, 32) == plain
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    inputs = torch.tensor(prompts)
    output = reference.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    assert output[:, len(prompts[0]) :].tolist() == plain


def shifted_states(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = MTPProposer.observe
    monkeypatch.setattr(
        MTPProposer, "observe", lambda self, batch, h, verdict: observe(self, batch, h.roll(1, 0), verdict)
    )


def shifted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    known = MTPProposer._known_tokens
    monkeypatch.setattr(MTPProposer, "_known_tokens", lambda self, s, positions, m: known(self, s, positions - 1, m))


@pytest.mark.parametrize("defect", [shifted_states, shifted_tokens])
def test_the_figures_show_what_the_text_does_not(defect, monkeypatch):
    """C02: with an index off by one the text is the same, at another price."""
    defect(monkeypatch)
    engine, golden = make_engine(3), HELD_OUT["golden"][:4]
    assert generate(engine, [one["prompt_ids"] for one in golden], 48) == [one["output_ids"][:48] for one in golden]
    expected = HELD_OUT["figures"]["acceptance_rates"]
    assert all(rate < figure - 10 * TOLERANCE for rate, figure in zip(rates(engine), expected, strict=True))
