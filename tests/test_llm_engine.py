"""Requests through the whole engine on a tiny model: what goes in, what comes out, what is refused."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from tests.helpers.tiny_models import reference_logits

PROMPT = [5, 9, 14, 9, 14, 9, 14, 77, 120]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "min_n": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def make_engine(tiny_checkpoint):
    def make(speculative: dict | None = None, **fields) -> LLMEngine:
        sizes = {"max_model_len": 128, "block_size": 8, "max_num_seqs": 8, **fields}
        folder = fields.pop("model", str(tiny_checkpoint("llama")))
        return LLMEngine(
            **{"model": folder, "dtype": "float32", "device": "cpu", **sizes},
            speculative_config=speculative,
            progress=False,
        )

    return make


def generate(engine: LLMEngine, params: SamplingParams, prompt=PROMPT, n=1):
    (output,) = engine.generate(prompt, params, n=n, use_tqdm=False)
    return output


def test_text_ids_logprobs_and_statistics_per_request(make_engine, capsys):
    engine = make_engine(NGRAM)
    outputs = engine.generate(["the quick brown fox", PROMPT], replace(GREEDY, logprobs=2))
    assert "Generating" in capsys.readouterr().err
    for output in outputs:
        (choice,) = output.outputs
        assert choice.text == engine.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert len(choice.token_ids) == len(choice.logprobs) == 20
        assert choice.finish_reason == "length"
        assert choice.stats.num_steps + choice.stats.num_accepted == 20


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.7},
        {"logit_bias": {9: 50.0}},
        {"logit_bias": {9: 4.0, 14: 4.0}, "frequency_penalty": 2.0},
        {"bad_words_token_ids": [[9, 14], [14]], "logit_bias": {9: 6.0, 14: 6.0}},
        {"min_tokens": 7, "stop_token_ids": list(range(0, 300, 2)), "ignore_eos": False},
        {"temperature": 0.9, "seed": 3, "min_p": 0.05, "top_p": 0.9, "top_k": 50},
        {"temperature": 1.3, "seed": 4, "repetition_penalty": 1.2, "logit_bias": {9: 5.0}},
    ],
)
def test_sampling_parameters_act_on_every_verification_row(changes, make_engine):
    params = replace(GREEDY, **changes)
    plain = generate(make_engine(), params).outputs[0]
    speculative = generate(make_engine(NGRAM), params).outputs[0]
    assert speculative.token_ids == plain.token_ids
    assert plain.token_ids != generate(make_engine(), GREEDY).outputs[0].token_ids, "the parameter has no effect"


def test_logprobs_equal_plain_decoding(make_engine):
    """A15: accepted tokens carry their probability, below 1, as plain decoding gives it."""
    params = replace(GREEDY, logprobs=3)
    plain = generate(make_engine(), params).outputs[0].logprobs
    output = generate(make_engine(NGRAM), params).outputs[0]
    assert output.stats.num_accepted > 0
    for ours, theirs in zip(output.logprobs, plain, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.logprob < 0
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        assert len(ours.top) == 3


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_equal_the_reference(budget, make_engine, tiny_checkpoint):
    engine = make_engine(NGRAM, max_num_batched_tokens=budget)
    params = replace(GREEDY, prompt_logprobs=1, max_tokens=2)
    logprobs = reference_logits(tiny_checkpoint("llama"), PROMPT).log_softmax(-1)
    for _ in range(2):  # the second time the prompt is in the prefix cache
        output = generate(engine, params)
        assert output.prompt_logprobs[0] is None
        for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
            assert entry.token_id == PROMPT[position]
            assert entry.logprob == pytest.approx(logprobs[position - 1, PROMPT[position]].item(), abs=1e-4)


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_exactly_max_tokens_are_delivered(max_tokens, make_engine):
    engine = make_engine(NGRAM)
    choice = generate(engine, replace(GREEDY, max_tokens=max_tokens)).outputs[0]
    assert len(choice.token_ids) == max_tokens == engine.stats()["num_generated_tokens"]
    assert choice.finish_reason == "length"


def test_a_stop_string_cuts_text_and_ids_alike_with_and_without_drafts(make_engine):
    whole = generate(make_engine(), GREEDY).outputs[0]
    stop = whole.text[5:8]
    params = replace(GREEDY, stop=[stop])
    plain, speculative = (generate(make_engine(config), params).outputs[0] for config in (None, NGRAM))
    assert speculative.text == plain.text == whole.text[: whole.text.index(stop)]
    assert speculative.token_ids == plain.token_ids == whole.token_ids[: len(plain.token_ids)]
    assert speculative.finish_reason == plain.finish_reason == "stop"
    assert speculative.stop_reason == stop


def test_children_of_a_seeded_request_differ_and_repeat(make_engine):
    params = SamplingParams(temperature=1.2, seed=11, max_tokens=16, ignore_eos=True)
    first, again = (generate(make_engine(config), params, n=3) for config in (None, NGRAM))
    ids = [choice.token_ids for choice in first.outputs]
    assert ids == [choice.token_ids for choice in again.outputs]
    assert len({tuple(one) for one in ids}) == 3


def test_unseeded_requests_differ(make_engine):
    """A11: each draws fresh entropy, also when alone."""
    engine = make_engine(NGRAM)
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    assert len({tuple(generate(engine, params).outputs[0].token_ids) for _ in range(16)}) == 16


def test_a_request_may_turn_speculation_off_or_down(make_engine):
    engine = make_engine(NGRAM)
    off = generate(engine, replace(GREEDY, num_speculative_tokens=0)).outputs[0]
    one = generate(engine, replace(GREEDY, num_speculative_tokens=1)).outputs[0]
    more = generate(engine, replace(GREEDY, num_speculative_tokens=99)).outputs[0]
    assert off.stats.num_drafted == 0
    assert len(one.stats.drafted_per_position) == 1
    assert len(more.stats.drafted_per_position) == 4
    assert off.token_ids == one.token_ids == more.token_ids


def test_the_servers_number_changes_live_within_its_limit(make_engine):
    engine = make_engine(NGRAM)
    engine.set_num_speculative_tokens(0)
    assert generate(engine, GREEDY).outputs[0].stats.num_drafted == 0
    engine.set_num_speculative_tokens(4)
    assert generate(engine, GREEDY).outputs[0].stats.num_drafted > 0
    with pytest.raises(ValueError, match="num_speculative_tokens is 5"):
        engine.set_num_speculative_tokens(5)


class FailingProposer:
    """Raises in every other step, or drafts what it may not."""

    def __init__(self, drafts=None) -> None:
        self.num_resets = 0
        self._drafts = drafts

    def catch_up(self, state, plan) -> None:
        raise RuntimeError("the drafter is broken")

    def can_draft(self, slots):
        return np.ones(len(slots), dtype=bool)

    def propose(self, state, plan):
        if self._drafts is None:
            raise RuntimeError("the drafter is broken")
        return self._drafts(plan)

    def observe(self, batch, hidden_states, verdict) -> None:
        raise RuntimeError("still broken")

    def reset(self) -> None:
        self.num_resets += 1


def test_a_drafter_that_raises_costs_drafts_and_nothing_else(make_engine, caplog):
    expected = generate(make_engine(), GREEDY).outputs[0].token_ids
    engine = make_engine(NGRAM)
    engine.executor.worker.proposer = FailingProposer()
    with caplog.at_level(logging.ERROR):
        assert generate(engine, GREEDY).outputs[0].token_ids == expected
    assert sum("the drafter is broken" in record.getMessage() for record in caplog.records) == 1
    stats = engine.stats()
    assert stats["num_drafter_faults"] == stats["num_steps"]
    assert engine.executor.worker.proposer.num_resets == stats["num_drafter_restarts"] > 0
    num_wanted = NGRAM["num_speculative_tokens"] * (stats["num_verifications"] - 1)  # the first comes with the prompt
    assert stats["num_refused_fault"] + stats["num_refused_context"] == num_wanted


@pytest.mark.parametrize("num_speculative_tokens", [4, "auto"])
def test_every_draft_that_was_not_made_has_its_reason(num_speculative_tokens, make_engine):
    engine = make_engine(NGRAM | {"num_speculative_tokens": num_speculative_tokens})
    generate(engine, GREEDY)
    stats = engine.stats()
    refused = {name: num for name, num in stats.items() if name.startswith("num_refused_")}
    num_decodes = stats["num_verifications"] - 1  # the first token comes with the prompt
    assert stats["num_drafted"] + sum(refused.values()) == stats["num_speculative_tokens"] * num_decodes
    assert refused["num_refused_proposer"] > 0, "nothing to look up in some steps"
    assert (refused["num_refused_controller"] > 0) == (num_speculative_tokens == "auto")
    assert refused["num_refused_fault"] == 0


def test_drafts_outside_the_vocabulary_never_reach_the_target(make_engine):
    import numpy as np

    from app.speculative.proposer import Drafts

    def out_of_range(plan):
        num = np.array([min(1, s.num_draft_tokens) for s in plan.scheduled])
        return Drafts(np.full((len(num), 1), 300), num)

    expected = generate(make_engine(), GREEDY).outputs[0].token_ids
    engine = make_engine(NGRAM)
    engine.executor.worker.proposer = FailingProposer(out_of_range)
    assert generate(engine, GREEDY).outputs[0].token_ids == expected
    assert engine.stats()["num_drafted"] == 0


def test_nan_logits_end_their_request_alone(make_engine):
    """D04: a visible error, not token 0; the neighbours go on."""
    engine = make_engine(NGRAM)
    expected = [o.outputs[0].token_ids for o in engine.generate([PROMPT, [3, 4]], GREEDY, use_tqdm=False)]
    model = engine.executor.worker.model_runner.model
    compute_logits = model.compute_logits

    def poisoned(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden_states)
        if len(logits) >= 3:
            logits[-1] = float("nan")
        return logits

    model.compute_logits = poisoned
    no_drafts = replace(GREEDY, num_speculative_tokens=0)
    outputs = engine.generate([PROMPT, [3, 4], [8, 8, 8]], no_drafts, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs[:2]] == expected
    failed = outputs[2].outputs[0]
    assert failed.finish_reason == "error"
    assert "NaN" in failed.error
    assert engine.stats()["num_failed"] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 100_000}, "max_model_len is 100000"),
        ({"kv_cache_memory": 1000}, "raise kv_cache_memory"),
        ({"kv_cache_memory": 10**15}, "are free: lower it"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens is 8"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(fields, message, make_engine):
    if "device" in fields and torch.cuda.is_available():
        fields = {"device": "cuda", "max_model_len": 10**9}
        message = "max_model_len"
    with pytest.raises(ValueError, match=message):
        make_engine(**fields)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "no tokens"),
        ([300], GREEDY, "0 to 299"),
        ([-1], GREEDY, "0 to 299"),
        ([3] * 128, GREEDY, "128 tokens"),
        ([3], replace(GREEDY, logit_bias={999: 1.0}), "token 999"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_served(prompt, params, message, make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(GenerationRequest("bad", prompt, params))
    assert len(generate(engine, GREEDY).outputs[0].token_ids) == 20


def test_a_sequence_fills_its_context_and_no_more(make_engine):
    engine = make_engine(NGRAM, max_model_len=32)
    choice = generate(engine, replace(GREEDY, max_tokens=None), prompt=[7, 8] * 15).outputs[0]
    assert len(choice.token_ids) == 2
    assert choice.finish_reason == "length"
