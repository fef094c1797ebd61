"""Our logits are those of transformers, for every architecture and every way of cutting a sequence into steps."""

import numpy as np
import pytest
import torch

from models.causal_lm import CausalLM
from models.loader import load_model
from tests.helpers.paged_runner import PagedRunner, whole_prompt_logits
from tests.helpers.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny_checkpoint, reference_logits

CPU = torch.device("cpu")
LENGTHS = (40, 1, 23, 9)
SEQUENCES = [np.random.default_rng(i).integers(0, VOCAB_SIZE, length).tolist() for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, tmp_path_factory) -> tuple[CausalLM, list[torch.Tensor]]:
    """A model, and transformers' logits of every sequence."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, with_tokenizer=False)
    expected = [reference_logits(folder, sequence) for sequence in SEQUENCES]
    return load_model(folder, None, CPU, progress=False), expected


def assert_equal_logits(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_whole_prompts_in_one_batch(case):
    model, expected = case
    logits = PagedRunner(model).step(dict(enumerate(SEQUENCES)))
    for i in range(len(SEQUENCES)):
        assert_equal_logits(logits[i], expected[i])


def test_chunks_of_uneven_sizes(case):
    """Sequences advance at different paces, so that a batch mixes prompts' chunks with single tokens."""
    model, expected = case
    runner, rng = PagedRunner(model, block_size=8, seed=1), np.random.default_rng(7)
    done = [0] * len(SEQUENCES)
    while any(done[i] < LENGTHS[i] for i in range(len(SEQUENCES))):
        sizes = {i: int(rng.integers(1, 8)) for i in range(len(SEQUENCES)) if done[i] < LENGTHS[i]}
        logits = runner.step({i: SEQUENCES[i][done[i] : done[i] + size] for i, size in sizes.items()})
        for i, rows in logits.items():
            assert_equal_logits(rows, expected[i][done[i] : done[i] + len(rows)])
            done[i] += len(rows)


def test_token_by_token(case):
    model, expected = case
    runner = PagedRunner(model, block_size=4, seed=2)
    for position in range(max(LENGTHS)):
        running = [i for i in range(len(SEQUENCES)) if position < LENGTHS[i]]
        logits = runner.step({i: [SEQUENCES[i][position]] for i in running})
        for i in running:
            assert_equal_logits(logits[i], expected[i][position : position + 1])


def test_rejected_tokens_are_written_over(case):
    """A verification with wrong drafts leaves nothing behind once the sequence goes on from where it was right."""
    model, expected = case
    runner = PagedRunner(model, seed=3)
    runner.step({0: SEQUENCES[0][:10]})
    logits = runner.step({0: [*SEQUENCES[0][10:12], 5, 5, 5]})
    assert_equal_logits(logits[0][:2], expected[0][10:12])
    runner.context_lens[0] = 12
    logits = runner.step({0: SEQUENCES[0][12:]})
    assert_equal_logits(logits[0], expected[0][12:])


def test_the_architectures_differ(tmp_path):
    """Every difference matters at these sizes: parity would not hold by accident."""
    base = whole_prompt_logits(load_model(make_tiny_checkpoint(tmp_path / "llama"), None, CPU, False), SEQUENCES[0])
    for other in ("llama3", "llama_linear", "mistral"):
        folder = make_tiny_checkpoint(tmp_path / other, other)
        logits = whole_prompt_logits(load_model(folder, None, CPU, progress=False), SEQUENCES[0])
        assert (logits - base).abs().max() > 0.05, other
