"""Weights arrive whole, from the right file, or not at all."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loader import load_model
from tests.helpers.paged_runner import whole_prompt_logits
from tests.helpers.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = [7, 250, 31, 31, 99, 12]
GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_tiny_checkpoint(tmp_path / "llama", with_tokenizer=False)


def logits(folder: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    return whole_prompt_logits(load_model(folder, dtype, CPU, progress=False), PROMPT)


def edit_weights(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shard(folder: Path, shards: list[dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> list[str]:
    """Splits the checkpoint's file; returns the shards' names."""
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name)
    placed = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    index = {"metadata": {}, "weight_map": placed | (weight_map or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def alternating(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Two shards; a merged parameter's tensors lie in both."""
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[i::2]} for i in range(2)]


@pytest.mark.parametrize("name", ["lm_head.weight", NORM, GATE, "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_an_error(folder, name):
    edit_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing: {name}; unexpected: none"):
        load_model(folder, None, CPU, progress=False)


def test_a_renamed_tensor_is_listed_as_missing_and_as_unexpected(folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.normal.weight": tensors.pop(NORM)}))
    with pytest.raises(ValueError, match=f"missing: {NORM}; unexpected: model.normal.weight"):
        load_model(folder, None, CPU, progress=False)


def test_a_bias_that_the_configuration_does_not_know_is_unexpected(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, "llama_bias", with_tokenizer=False)
    edit_config(folder, attention_bias=False)
    with pytest.raises(ValueError, match=r"missing: none; unexpected: model.layers.0.self_attn.k_proj.bias, "):
        load_model(folder, None, CPU, progress=False)


def test_more_layers_than_the_checkpoint_holds(folder):
    edit_config(folder, num_hidden_layers=9)
    with pytest.raises(ValueError, match=r"missing: model.layers.2.input_layernorm.weight, .* and 43 more; unexpected"):
        load_model(folder, None, CPU, progress=False)


def test_harmless_extras_are_passed_over(folder):
    expected = logits(folder)
    extras = {f"{prefix}rotary_emb.inv_freq": torch.ones(8) for prefix in ("model.", "model.layers.0.self_attn.")}
    edit_weights(folder, lambda tensors: tensors.update(extras))
    assert torch.equal(logits(folder), expected)


def test_a_tied_checkpoint_may_repeat_its_embedding_as_head(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, "llama_tied", with_tokenizer=False)
    expected = logits(folder)
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert torch.equal(logits(folder), expected)


def test_a_shape_that_the_configuration_does_not_say(folder):
    edit_config(folder, intermediate_size=80)
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \[64, 96\], config.json asks for \[64, 80\]"):
        load_model(folder, None, CPU, progress=False)


def test_a_transposed_tensor_is_no_better(folder):
    edit_weights(folder, lambda tensors: tensors.update({GATE: tensors[GATE].T.contiguous()}))
    with pytest.raises(ValueError, match=rf"{GATE} has shape \[64, 96\], config.json asks for \[96, 64\]"):
        load_model(folder, None, CPU, progress=False)


def test_integers_are_no_weights(folder):
    edit_weights(folder, lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.int8)}))
    with pytest.raises(ValueError, match=f"{GATE} is stored as I8"):
        load_model(folder, None, CPU, progress=False)


def test_a_file_cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file"):
        load_model(folder, None, CPU, progress=False)


def test_a_folder_without_safetensors(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model.safetensors.index.json"):
        load_model(folder, None, CPU, progress=False)


def test_shards_give_the_same_model(folder):
    expected = logits(folder)
    shard(folder, alternating(load_file(folder / "model.safetensors")))
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("name", [GATE, UP])
def test_a_stale_copy_in_another_shard_is_not_read(folder, name):
    """One of the names lies in the first shard and its stale copy in the second, the other the other way round."""
    expected = logits(folder)
    shards = alternating(load_file(folder / "model.safetensors"))
    right = 0 if name in shards[0] else 1
    shards[1 - right][name] = torch.full_like(shards[right][name], 3.0)
    shard(folder, shards, {name: f"model-0000{right + 1}-of-00002.safetensors"})
    assert torch.equal(logits(folder), expected)


def test_a_missing_shard_is_named(folder):
    names = shard(folder, alternating(load_file(folder / "model.safetensors")))
    (folder / names[1]).unlink()
    with pytest.raises(ValueError, match=f"names shards that are not there: {names[1]}"):
        load_model(folder, None, CPU, progress=False)


def test_a_shard_that_lacks_what_the_index_places_there(folder):
    first, second = alternating(load_file(folder / "model.safetensors"))
    assert NORM in first
    names = shard(folder, [first, second], {NORM: "model-00002-of-00002.safetensors"})
    with pytest.raises(ValueError, match=f"places {NORM} in {names[1]}, which does not hold"):
        load_model(folder, None, CPU, progress=False)


def test_stray_files_beside_the_shards_are_ignored(folder):
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    shard(folder, alternating(tensors))
    stray = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name in ("consolidated.safetensors", "model.safetensors", "model-00003-of-00003.safetensors"):
        save_file(stray, folder / name)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_the_checkpoints_unless_asked(tmp_path, dtype, caplog):
    folder = make_tiny_checkpoint(tmp_path, dtype=dtype, with_tokenizer=False)
    model = load_model(folder, None, CPU, progress=False)
    assert model.config.dtype == model.model.norm.weight.dtype == model.kv_specs()[0].dtype == dtype
    assert not caplog.records
    wide = logits(folder, torch.float32)
    tolerance = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float32: 0.0}[dtype]
    assert (whole_prompt_logits(model, PROMPT) - wide).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("stored", "asked", "warns"),
    [
        (torch.bfloat16, torch.float16, True),
        (torch.float32, torch.float16, True),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float32, False),
    ],
)
def test_narrowing_warns_once(tmp_path, stored, asked, warns, caplog):
    folder = make_tiny_checkpoint(tmp_path, dtype=stored, with_tokenizer=False)
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, asked, CPU, progress=False)
    assert model.config.dtype == asked
    assert [str(stored) in record.message and str(asked) in record.message for record in caplog.records] == [
        True
    ] * warns


def test_weights_beyond_the_range_of_fp16_are_refused(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, dtype=torch.bfloat16, with_tokenizer=False)
    edit_weights(folder, lambda tensors: tensors[GATE].view(-1)[17:18].fill_(7e4))
    assert load_model(folder, torch.bfloat16, CPU, progress=False).config.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=f"{GATE} holds values beyond the range of torch.float16"):
        load_model(folder, torch.float16, CPU, progress=False)


def test_every_parameter_is_real_and_the_model_does_not_learn(folder):
    model = load_model(folder, None, CPU, progress=False)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.device == CPU, name
        assert not parameter.requires_grad, name


def test_positions_are_prepared_for_the_sequences_to_come(folder):
    """A checkpoint of a million positions must not cost half a gigabyte where a few thousand are served."""
    for max_positions, expected in ((None, 512), (len(PROMPT), len(PROMPT)), (600, 600)):
        model = load_model(folder, None, CPU, progress=False, max_positions=max_positions)
        rotary = model.model.layers[1].self_attn.rotary
        assert rotary is model.model.layers[0].self_attn.rotary
        assert rotary.cos_sin_cache.shape == (expected, 16)
        assert torch.equal(whole_prompt_logits(model, PROMPT), logits(folder))


def test_the_bar_counts_the_bytes_of_the_weights(folder, capsys):
    load_model(folder, None, CPU, progress=True)
    bar = capsys.readouterr().err.rpartition("\r")[2]
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert "Loading weights: 100%" in bar
    assert f"{num_bytes / 1024:.0f}k/{num_bytes / 1024:.0f}k" in bar
    load_model(folder, None, CPU, progress=False)
    assert capsys.readouterr().err == ""


MEASURE_MEMORY = """
import sys, torch
from pathlib import Path
from models.loader import load_model

def status(field):
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024

load_model(Path(sys.argv[1]), None, torch.device("cpu"), progress=False)  # kernels are compiled and loaded by now
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
model = load_model(Path(sys.argv[2]), None, torch.device("cpu"), progress=False)
print(status("VmHWM") - before, status("VmRSS") - before)
"""


def test_weights_are_never_in_memory_twice(folder, tmp_path):
    large = make_tiny_checkpoint(
        tmp_path / "large", with_tokenizer=False, hidden_size=256, intermediate_size=1024, num_hidden_layers=20
    )
    num_bytes = (large / "model.safetensors").stat().st_size
    assert num_bytes > 75e6
    command = [sys.executable, "-c", MEASURE_MEMORY, str(folder), str(large)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    peak, kept = map(int, output.split())
    assert 0.9 * num_bytes < kept < 1.1 * num_bytes
    assert peak < 1.4 * num_bytes


def test_models_load_without_transformers():
    command = "import sys, models.loader, models.checkpoint, models.tokenizer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=120).returncode == 0
