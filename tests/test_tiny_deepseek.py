"""The DeepSeek-V3 miniature that ships with the repository: its files, its text, and what its MTP module accepts."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.assets.tiny_deepseek_training.checkpoint import read_network, release_tensors
from tests.assets.tiny_deepseek_training.corpus import ASSISTANT, BEGIN, USER
from tests.assets.tiny_deepseek_training.evaluation import Continuation, draft, forced_agreement, greedy_acceptance
from tests.assets.tiny_deepseek_training.network import Network
from tests.assets.tiny_deepseek_training.shape import Shape
from tests.assets.train_tiny_deepseek import FOLDER, Schedule, train

MAX_BYTES = 8_000_000
MTP_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
ATTENTION_NAMES = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors of this size lose more by waiting for a second thread than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def heldout() -> dict:
    return json.loads((FOLDER / "heldout.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def network() -> Network:
    return read_network(FOLDER, Shape())


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def golden_of(heldout: dict) -> list[Continuation]:
    return [Continuation(**one) for one in heldout["golden"]]


def test_the_folder_is_small_and_whole():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "heldout.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_tensors_are_named_as_in_the_release(tensors):
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    mtp = config["num_hidden_layers"]
    for layer in range(mtp + 1):
        prefix = f"model.layers.{layer}"
        expected |= {f"{prefix}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"{prefix}.self_attn.{name}.weight" for name in ATTENTION_NAMES}
        if layer < config["first_k_dense_replace"]:
            expected |= {f"{prefix}.mlp.{name}.weight" for name in MLP_NAMES}
            continue
        expected |= {f"{prefix}.mlp.gate.weight", f"{prefix}.mlp.gate.e_score_correction_bias"}
        for expert in range(config["n_routed_experts"]):
            expected |= {f"{prefix}.mlp.experts.{expert}.{name}.weight" for name in MLP_NAMES}
        expected |= {f"{prefix}.mlp.shared_experts.{name}.weight" for name in MLP_NAMES}
    expected |= {f"model.layers.{mtp}.{name}.weight" for name in MTP_NAMES}
    assert set(tensors) == expected
    biases = {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.float32} == biases
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name not in biases)
    assert torch.equal(tensors[f"model.layers.{mtp}.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[f"model.layers.{mtp}.shared_head.head.weight"], tensors["lm_head.weight"])


def test_reading_and_writing_again_changes_nothing(tensors, network):
    written = release_tensors(network)
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_transformers_continues_as_recorded(reference, heldout):
    for one in golden_of(heldout)[:2]:
        prompt = torch.tensor([one.prompt_ids])
        out = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(one.output_ids),
            do_sample=False,
            eos_token_id=None,
        )
        assert out[0].tolist() == one.prompt_ids + one.output_ids


@torch.no_grad()
def test_logits_equal_those_of_transformers(reference, network, heldout):
    token_ids = torch.tensor(heldout["prompt_ids"][:4])
    torch.testing.assert_close(
        network.lm_head(network.hidden(token_ids)), reference(token_ids).logits, atol=1e-3, rtol=1e-4
    )


def test_the_recorded_acceptance_is_the_required_one(heldout):
    figures = heldout["figures"]
    rates = [count / figures["num_verifications"] for count in figures["accepted_at"]]
    assert figures["acceptance_rates"] == pytest.approx(rates, abs=1e-4)
    assert rates[0] >= 0.6
    assert figures["mean_acceptance_length"] == pytest.approx(1 + sum(rates), abs=1e-4)
    assert 1 + sum(rates) >= 1.8


def test_drafts_are_accepted_on_held_out_text(network, heldout):
    acceptance = greedy_acceptance(network, golden_of(heldout)[:2], k=3)
    assert acceptance.num_verifications > 30
    assert acceptance.rates[0] >= 0.6
    assert acceptance.mean_length >= 1.8


@torch.no_grad()
def test_drafts_come_from_the_hidden_state_and_not_from_the_last_token_alone(network, heldout):
    one = golden_of(heldout)[0]
    tokens = one.prompt_ids + one.output_ids
    hidden = network.hidden(torch.tensor([tokens]))[0]
    known = range(len(one.prompt_ids) + 1, len(tokens), 3)

    def hits(rows: Tensor) -> int:
        return sum(draft(network, rows[: at - 1], tokens[:at], 1)[0] == tokens[at] for at in known)

    assert hits(hidden) > hits(torch.zeros_like(hidden))


def test_agreement_along_true_text_is_lower_than_along_greedy_text(network, heldout):
    """Greedy text of a small model repeats itself, so both are recorded."""
    agreement = forced_agreement(network, torch.tensor(heldout["prompt_ids"]))
    assert 0.3 < agreement < heldout["figures"]["acceptance_rates"][0] + 0.05


def test_the_tokenizer_is_lossless_and_has_a_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = "def f(x):\n\treturn 'naïve \N{SNOWMAN}'  # ok\n"
    token_ids = tokenizer(text).input_ids
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    messages = [{"role": "user", "content": "What is the module json?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == f"{BEGIN}{USER}What is the module json?{ASSISTANT}"
    messages += [{"role": "assistant", "content": "A coder."}, {"role": "user", "content": "Thanks"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == (
        f"{BEGIN}{USER}What is the module json?{ASSISTANT}A coder.{tokenizer.eos_token}{USER}Thanks{ASSISTANT}"
    )


SMALL = Shape(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    n_routed_experts=8,
    max_position_embeddings=256,
)


def trained(state_path: Path, num_steps: int) -> Network:
    torch.manual_seed(1)
    network = Network(SMALL)
    stream = torch.arange(2000) % 7 + 4
    train(network, stream, 0, Schedule(num_steps, None, time.monotonic()), state_path)
    return network


def test_training_goes_on_from_its_state_as_if_never_stopped(tmp_path):
    stopped = trained(tmp_path / "stopped.pt", num_steps=2)
    assert any(router.e_score_correction_bias.any() for router in stopped.routers)
    whole = trained(tmp_path / "whole.pt", num_steps=4)
    continued = trained(tmp_path / "stopped.pt", num_steps=4)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), continued.parameters(), strict=True))
