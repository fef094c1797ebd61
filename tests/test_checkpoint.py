"""From a GGUF file, a folder or a hub id to a folder that loads."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

import models.gguf
from models.checkpoint import resolve_checkpoint
from models.config import read_model_config
from models.gguf import convert_gguf
from models.loader import load_model
from models.tokenizer import load_tokenizer
from tests.helpers.paged_runner import whole_prompt_logits
from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import CHAT_TEMPLATE, LLAMA3_ROPE, make_tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = [7, 250, 31, 31, 99, 12, 140, 3]
TEXT = "The quick brown fox<|im_end|> jumps 123 times – naïve 🦊"
F32, Q8_0, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q4_1"))


@pytest.fixture
def original(tmp_path) -> Path:
    return make_tiny_checkpoint(tmp_path / "original")


@pytest.fixture
def tiny_gguf(tmp_path, original) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, original)
    return path


def logits(folder: Path) -> torch.Tensor:
    return whole_prompt_logits(load_model(folder, None, CPU, progress=False), PROMPT)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama_tied", {"hidden_size": 96}),
        ("llama3", {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_converted_checkpoint_is_the_same_model(tmp_path, architecture, overrides):
    original = make_tiny_checkpoint(tmp_path / "original", architecture, **overrides)
    write_tiny_gguf(tmp_path / "tiny.gguf", original)
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted", torch.float32, progress=False)
    torch.testing.assert_close(logits(tmp_path / "converted"), logits(original), rtol=1e-5, atol=1e-5)

    config, expected = read_model_config(tmp_path / "converted"), read_model_config(original)
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.bos_token_id == expected.bos_token_id
    assert config.eos_token_ids == (0, 2), "the declared end, and that of a message"

    tokenizer, expected_tokenizer = load_tokenizer(tmp_path / "converted"), load_tokenizer(original)
    assert tokenizer(TEXT).input_ids == expected_tokenizer(TEXT).input_ids
    assert tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [Q8_0, Q4_1])
def test_quantised_weights_are_dequantised(tmp_path, original, quantization, dtype):
    held = write_tiny_gguf(tmp_path / "tiny.gguf", original, quantization)
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted", dtype, progress=False)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert converted.keys() == held.keys()
    for name, tensor in held.items():
        assert torch.equal(converted[name], tensor.to(dtype)), name
    assert read_model_config(tmp_path / "converted").dtype == dtype


def test_a_file_is_converted_once(tmp_path, tiny_gguf):
    out = tmp_path / "deeper" / "converted"
    assert convert_gguf(tiny_gguf, out, torch.bfloat16, progress=False)
    made = (out / "model.safetensors").stat().st_mtime_ns
    assert not convert_gguf(tiny_gguf, out, torch.bfloat16, progress=False)
    assert (out / "model.safetensors").stat().st_mtime_ns == made


def test_another_dtype_or_a_changed_file_replaces_the_folder(tmp_path, tiny_gguf):
    out = tmp_path / "converted"
    assert convert_gguf(tiny_gguf, out, torch.bfloat16, progress=False)
    assert convert_gguf(tiny_gguf, out, torch.float32, progress=False)
    assert read_model_config(out).dtype == torch.float32
    changed = make_tiny_checkpoint(tmp_path / "changed", seed=1)
    write_tiny_gguf(tiny_gguf, changed)
    assert convert_gguf(tiny_gguf, out, torch.float32, progress=False)
    torch.testing.assert_close(logits(out), logits(changed), rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "converted", "original", "tiny.gguf"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path, tiny_gguf, monkeypatch):
    def fail(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(models.gguf, "write_safetensors", fail)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(tiny_gguf, tmp_path / "converted", torch.float32, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "tiny.gguf"]


@pytest.mark.parametrize("before", ["nothing", "another dtype"])
def test_of_two_conversions_at_once_both_succeed(tmp_path, tiny_gguf, monkeypatch, before):
    """The second runs from start to end while the first is about to put its folder in place."""
    out = tmp_path / "converted"
    if before == "another dtype":
        convert_gguf(tiny_gguf, out, torch.bfloat16, progress=False)
    install, outcomes = models.gguf._install, []

    def install_after_another(*args, **kwargs) -> None:
        monkeypatch.setattr(models.gguf, "_install", install)
        outcomes.append(convert_gguf(tiny_gguf, out, torch.float32, progress=False))
        install(*args, **kwargs)

    monkeypatch.setattr(models.gguf, "_install", install_after_another)
    outcomes.append(convert_gguf(tiny_gguf, out, torch.float32, progress=False))
    assert outcomes == [True, True]
    assert read_model_config(out).dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "original", "tiny.gguf"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path, tiny_gguf, original):
    with pytest.raises(ValueError, match="was not made by this converter"):
        convert_gguf(tiny_gguf, original, torch.float32, progress=False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"expert_count": 8}, r"llama.expert_count is 8; only 0 is implemented"),
        ({"rope.scaling.type": "yarn"}, r'llama.rope.scaling.type is "yarn"; implemented are none, linear'),
        ({"rope.dimension_count": 8}, r"llama.rope.dimension_count is 8; only 16"),
    ],
)
def test_what_cannot_be_represented_is_refused(tmp_path, original, extra, message):
    write_tiny_gguf(tmp_path / "tiny.gguf", original, **extra)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted", torch.float32, progress=False)
    assert not (tmp_path / "converted").exists()


def test_an_unknown_architecture_is_refused_with_those_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r'general\.architecture is "bert"; implemented are llama, qwen2, qwen3'):
        convert_gguf(tmp_path / "bert.gguf", tmp_path / "converted", torch.float32, progress=False)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ValueError, match="is not a whole GGUF file"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "converted", torch.float32, progress=False)


def test_linear_scaling_is_carried_over(tmp_path, original):
    write_tiny_gguf(tmp_path / "tiny.gguf", original, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted", torch.float32, progress=False)
    rope = json.loads((tmp_path / "converted" / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def test_the_command_line(tmp_path, tiny_gguf):
    command = [sys.executable, "-m", "models.gguf", str(tiny_gguf), str(tmp_path / "out"), "--dtype", "float32"]
    first, again = (subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, f"{tmp_path / 'out'} written\n")
    assert "Converting: 100%" in first.stderr
    assert (again.returncode, again.stdout) == (0, f"{tmp_path / 'out'} is up to date\n")
    command[3] = str(tmp_path / "none.gguf")
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (failed.returncode, failed.stderr) == (1, f"error: {tmp_path / 'none.gguf'} is not a file\n")


def test_resolving_a_gguf_converts_it_into_the_cache(tmp_path, tiny_gguf, original, capsys):
    folder = resolve_checkpoint(str(tiny_gguf), progress=False, cache_folder=tmp_path / "cache")
    assert capsys.readouterr().err == ""
    assert read_model_config(folder).dtype == torch.bfloat16
    assert resolve_checkpoint(str(tiny_gguf), progress=True, cache_folder=tmp_path / "cache") == folder
    assert capsys.readouterr().err == "", "converted already"
    wide = resolve_checkpoint(str(tiny_gguf), progress=True, dtype=torch.float32, cache_folder=tmp_path / "cache")
    assert "Converting: 100%" in capsys.readouterr().err
    assert wide != folder
    torch.testing.assert_close(logits(wide), logits(original), rtol=1e-5, atol=1e-5)


def test_resolving_a_folder_gives_the_folder(original):
    assert resolve_checkpoint(str(original), progress=False) == original


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{tmp}/none", r"none is neither a folder nor a hub id"),
        ("{tmp}/none.gguf", r"none.gguf is not a file"),
        ("{tmp}", r"is a folder without config.json: name one of its files: tiny.gguf"),
        ("{tmp}/empty", r"is a folder without config.json: give the folder of a Hugging Face checkpoint"),
        ("../none/such/model", r"is neither a folder nor a hub id"),
        ("some-organisation/some-model", r"is no folder here, and the hub does not give it \(LocalEntryNotFoundError"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, tiny_gguf, model, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        resolve_checkpoint(model.format(tmp=tmp_path), progress=False, cache_folder=tmp_path / "cache")


def test_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
