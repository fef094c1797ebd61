"""Two ranks say what one says: every proposer, drafters shared or whole, experts shared or whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.multiprocessing as mp

from app.engine.sampling_params import SamplingParams
from app.engine_config import EngineConfig
from app.llm_engine import LLMEngine
from app.speculative.step_decision import StepDecision
from models import parallel
from tests.helpers.rank_processes import process_group, run_ranks

PROMPTS = [list(range(3, 40)), [7, 7, 9, 7, 7, 9, 7, 7], [250, 31, 4], [5, 6] * 15]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
JUDGED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SIZES = {
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "kv_cache_memory": 1 << 20,
}


def answers(engine: LLMEngine) -> dict[str, Any]:
    """Token ids of every prompt, twice (the second time from the prefix cache), with what the drafts came to."""
    params = [GREEDY, SEEDED, GREEDY, JUDGED]
    rounds = [engine.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
    judged = rounds[0][3]
    return {
        "token_ids": [[output.outputs[0].token_ids for output in outputs] for outputs in rounds],
        "prompt_logprobs": [entry.logprob for entry in judged.prompt_logprobs if entry is not None],
        "stats": engine.stats(),
    }


@pytest.fixture(scope="module")
def cases(tiny_checkpoint) -> dict[str, dict[str, Any]]:
    llama, draft = str(tiny_checkpoint("llama")), str(tiny_checkpoint("llama", num_hidden_layers=1))
    deepseek = str(tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=2))

    def speculating(method: str, **fields: Any) -> dict[str, Any]:
        return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **fields}}

    return {
        "plain": {"model": llama},
        "suffix": {"model": llama, **speculating("suffix")},
        "ngram": {"model": llama, **speculating("ngram", min_n=1)},
        "whole draft model": {"model": llama, **speculating("draft_model", model=draft)},
        "shared draft model": {
            "model": llama,
            **speculating("draft_model", model=draft, draft_tensor_parallel_size=2, num_speculative_tokens="auto"),
        },
        "perfect draft model": {
            "model": llama,
            **speculating("draft_model", model=llama, draft_tensor_parallel_size=2),
        },
        "mtp": {"model": deepseek, **speculating("mtp")},
        "mtp, whole experts": {
            "model": deepseek,
            "expert_parallel": True,
            **speculating("mtp", num_speculative_tokens="auto"),
        },
    }


@pytest.fixture(scope="module")
def of_two_ranks(cases, tmp_path_factory) -> dict[str, dict[str, Any]]:
    configs = [{**SIZES, **case} for case in cases.values()]
    return dict(zip(cases, run_ranks(2, tmp_path_factory.mktemp("ranks"), configs, answers), strict=True))


CASES = [
    "plain",
    "suffix",
    "ngram",
    "whole draft model",
    "shared draft model",
    "perfect draft model",
    "mtp",
    "mtp, whole experts",
]


def one_rank(case: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one rank that is to say the same."""
    fields = {**SIZES, **case}
    fields.pop("expert_parallel", None)
    if (speculative := fields.get("speculative_config")) is not None:
        speculative = {k: v for k, v in speculative.items() if k != "draft_tensor_parallel_size"}
        fields["speculative_config"] = speculative
    return fields


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_say_what_one_says(cases, of_two_ranks, name):
    expected = answers(LLMEngine(EngineConfig(**one_rank(cases[name])), progress=False))
    found = of_two_ranks[name]
    assert found["token_ids"] == expected["token_ids"]
    assert found["prompt_logprobs"] == pytest.approx(expected["prompt_logprobs"], abs=1e-4)
    assert found["stats"]["num_drafter_faults"] == 0
    assert found["stats"]["num_free_blocks"] == found["stats"]["num_blocks"]


def test_every_case_is_asked_for(cases):
    assert list(cases) == CASES


def test_drafts_of_two_ranks_are_accepted(of_two_ranks):
    for name in ("perfect draft model", "whole draft model", "mtp"):
        assert of_two_ranks[name]["stats"]["num_accepted"] > 0, name
    perfect = of_two_ranks["perfect draft model"]["stats"]
    assert perfect["num_accepted"] > 0.8 * perfect["num_drafted"], "the drafter on two ranks is the target itself"


@pytest.mark.parametrize(("num_last", "num_seqs", "k"), [(0, 0, 0), (0, 2, 0), (3, 1, 4), (40, 40, 32)])
def test_a_decision_arrives_as_it_was_packed(num_last, num_seqs, k):
    """All but the token ids that nobody reads, which stay behind."""
    rng = np.random.default_rng(0)
    emitted, drafts = rng.integers(1, 1 << 40, (num_last, k + 1)), rng.integers(1, 1 << 40, (num_seqs, k))
    num_emitted, num_drafts = rng.integers(0, k + 2, num_last), rng.integers(0, k + 1, num_seqs)
    decision = StepDecision.unpack(StepDecision(num_emitted, emitted, num_drafts, drafts).packed())
    for ids, num, found_ids, found_num in (
        (emitted, num_emitted, decision.emitted_token_ids, decision.num_emitted),
        (drafts, num_drafts, decision.draft_token_ids, decision.num_drafts),
    ):
        assert found_num.tolist() == num.tolist()
        assert [row[:n].tolist() for row, n in zip(found_ids, num, strict=True)] == [
            row[:n].tolist() for row, n in zip(ids, num, strict=True)
        ]


def tell_or_listen(rank: int, work: Path, lengths: list[int]) -> None:
    with process_group(rank, 2, work) as group:
        parallel.set_tensor_parallel_group(group)
        for length in lengths:
            values = np.arange(length, dtype=np.int64) << 40
            if rank == 0:
                parallel.tell(values)
            else:
                assert parallel.listen().tolist() == values.tolist()
        assert parallel.least(7 - rank) == 6


def test_messages_of_any_length_reach_the_other_rank(tmp_path):
    size = parallel.PACKET_SIZE
    mp.spawn(tell_or_listen, (tmp_path, [0, 1, size - 2, size - 1, size, 3 * size]), nprocs=2)


def test_draft_ranks_are_one_or_all():
    draft = {"method": "draft_model", "model": "x/y"}
    with pytest.raises(ValueError, match="draft_tensor_parallel_size is 2, and tensor_parallel_size 4: use 1 or 4"):
        EngineConfig(model="m", tensor_parallel_size=4, speculative_config={**draft, "draft_tensor_parallel_size": 2})
    mtp = {"method": "mtp", "draft_tensor_parallel_size": 1}
    with pytest.raises(ValueError, match="draft_tensor_parallel_size is 1, and tensor_parallel_size 2: use 2"):
        EngineConfig(model="m", tensor_parallel_size=2, speculative_config=mtp)
