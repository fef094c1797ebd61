"""C01: a drafter that never guesses right is heard of, and one that does is not."""

import logging

import pytest

from app.engine.outputs import SpeculationStats
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.speculative.acceptance_watch import AcceptanceWatch


def watched(caplog: pytest.LogCaptureFixture, accepted: list[int], drafted: int = 2) -> list[str]:
    """Warnings after each of the verifications, in windows of 10 with a floor of a fifth."""
    watch, stats = AcceptanceWatch(floor=0.2, window=10), SpeculationStats()
    for num_accepted in accepted:
        stats.count(drafted, num_accepted)
        watch.observe(stats)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_window_below_the_floor_is_told_with_its_number(caplog):
    (message,) = watched(caplog, [1] + [0] * 9)
    assert message.startswith("Of the last 10 first drafts 10.0% were kept, below 20%")


def test_the_floor_itself_and_an_unfinished_window_are_not(caplog):
    assert watched(caplog, [1, 2] + [0] * 17) == []


def test_it_is_told_once_until_acceptance_recovers(caplog):
    assert len(watched(caplog, [0] * 30)) == 1
    caplog.clear()
    assert len(watched(caplog, [0] * 20 + [1] * 10 + [0] * 10)) == 2


def test_steps_without_drafts_do_not_count(caplog):
    assert watched(caplog, [0] * 50, drafted=0) == []


@pytest.mark.parametrize("layers", [1, 2])
def test_the_engine_watches_its_drafter(layers, tiny_checkpoint, caplog):
    """A draft model of other weights, and the target itself as a perfect one."""
    target, draft = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=2 - layers, num_hidden_layers=layers)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 1}
    engine = LLMEngine(
        model=str(target), dtype="float32", device="cpu", max_model_len=64, max_num_seqs=32, progress=False,
        speculative_config=speculative,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=58, ignore_eos=True)
    engine.generate([[3 + i, 7] for i in range(32)], params, use_tqdm=False)
    warnings = [record.getMessage() for record in caplog.records if "first drafts" in record.getMessage()]
    assert len(warnings) == (layers == 1)
