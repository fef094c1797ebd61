"""What can not be served with MTP is refused at start, in one sentence with file, field and remedy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.llm_engine import LLMEngine
from tests.helpers.tiny_models import make_tiny_checkpoint

KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mtp"), "deepseek_v3", num_nextn_predict_layers=1)


@pytest.fixture
def checkpoint(written, tmp_path) -> Path:
    """A copy to spoil."""
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def _no_weights(monkeypatch) -> None:
    """Of a large target they take minutes to read."""

    def load_nothing(*arguments: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("app.worker_loader.load_model", load_nothing)


def refusal(folder: Path, **speculative: object) -> str:
    speculative = {"method": "mtp", "num_speculative_tokens": 1, **speculative}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  what it says is the caller's to check
        LLMEngine(model=str(folder), device="cpu", max_model_len=32, progress=False, speculative_config=speculative)
    return str(caught.value)


def assert_says(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message
    assert "\n" not in message


def drop(folder: Path, prefix: str, every: int = 1) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.startswith(prefix)][::every]:
        del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.usefixtures("_no_weights")
def test_a_checkpoint_without_its_mtp_layer(checkpoint):
    drop(checkpoint, "model.layers.2.")
    message = refusal(checkpoint)
    assert_says(
        message, checkpoint, "model.layers.2.", "num_nextn_predict_layers in config.json", "take a checkpoint with"
    )


def test_a_checkpoint_with_half_of_it(checkpoint):
    drop(checkpoint, "model.layers.2.", every=2)
    message = refusal(checkpoint)
    assert_says(message, checkpoint, "missing: model.layers.2.", "take a checkpoint with the whole of its MTP layer")


@pytest.mark.usefixtures("_no_weights")
def test_a_checkpoint_that_counts_no_mtp_layer(checkpoint):
    drop(checkpoint, "model.layers.2.")
    edit_config(checkpoint, num_nextn_predict_layers=0)
    message = refusal(checkpoint)
    assert_says(message, checkpoint / "config.json", "num_nextn_predict_layers is 0 or missing", "choose another")


@pytest.mark.usefixtures("_no_weights")
def test_a_checkpoint_with_an_mtp_layer_that_it_does_not_count(checkpoint):
    edit_config(checkpoint, num_nextn_predict_layers=0)
    message = refusal(checkpoint)
    assert_says(
        message, checkpoint / "config.json", "num_nextn_predict_layers is 0", "correct it", "tensors model.layers.2.*"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topk_method": "random"}, 'topk_method is "random"; use a checkpoint with noaux_tc'),
        (
            {"scoring_func": "tanh"},
            'scoring_func is "tanh"; use a checkpoint with "sigmoid", which topk_method "noaux_tc"',
        ),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}},
            'rope_parameters: rope_type is "spiral"; use a checkpoint with one of default, linear, llama3, yarn',
        ),
    ],
)
def test_a_configuration_that_is_not_known(fields, said, checkpoint):
    edit_config(checkpoint, **fields)
    assert_says(refusal(checkpoint), checkpoint / "config.json", said)


def test_scales_of_the_wrong_shape(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors[KV_B] = tensors[KV_B].to(torch.float8_e4m3fn)
    tensors[f"{KV_B}_scale_inv"] = torch.ones(3, 3)
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(checkpoint, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    assert_says(refusal(checkpoint), path, f"{KV_B}_scale_inv is F32 [3, 3]", "use a checkpoint with F32 [1, 1]")


@pytest.mark.parametrize(("k", "bound"), [(0, "greater than or equal to 1"), (33, "less than or equal to 32")])
def test_a_number_of_drafts_out_of_bounds(k, bound, checkpoint):
    message = refusal(checkpoint, num_speculative_tokens=k)
    assert_says(message, f"EngineConfig.speculative_config.num_speculative_tokens is {k}: input should be", bound)


@pytest.mark.usefixtures("_no_weights")
def test_a_target_without_modules(tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "llama", "llama")
    message = refusal(folder)
    assert_says(
        message, folder / "config.json", 'architectures is ["LlamaForCausalLM"]', "choose another speculative method"
    )
