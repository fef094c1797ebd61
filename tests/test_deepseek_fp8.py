"""FP8 weights by blocks, against a dequantisation of the test's own; and every way in which scales can be wrong."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import ops
from kernels.packed_weight import BlockScaledWeight, PackedWeight
from models import parallel
from models.block_fp8 import pair_with_scales
from models.config import read_model_config
from models.drafters.deepseek_mtp import load_mtp
from models.loader import load_model
from models.weight_index import read_weight_index
from tests.helpers.paged_runner import whole_prompt_logits
from tests.helpers.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = [7, 250, 31, 31, 99, 12, 180, 3]
BLOCK = (16, 24)  # divides few of the tiny matrices
KEPT = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "bias", "head.weight")
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 values, one scale a block, and what they stand for, entry by entry."""
    rows, columns = weight.shape
    quantised = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / BLOCK[0]), math.ceil(columns / BLOCK[1]))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scales[i, j] = weight[block].abs().max() / 448
            quantised[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            meant[i, j] = float(quantised[i, j]) * float(scales[i // BLOCK[0], j // BLOCK[1]])
    return quantised, scales, meant


def edit(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """An FP8 checkpoint with an MTP module, and the same in fp32."""
    root = tmp_path_factory.mktemp("fp8")
    sizes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    pair = []
    for name in ("fp8", "fp32"):
        pair.append(make_tiny_checkpoint(root / name, "deepseek_v3", False, num_nextn_predict_layers=1, **sizes))
    parts = {
        name: quantise(tensor)
        for name, tensor in load_file(pair[0] / "model.safetensors").items()
        if not name.endswith(KEPT)
    }
    edit(pair[0], lambda tensors: tensors.update({name: part[0] for name, part in parts.items()}))
    edit(pair[0], lambda tensors: tensors.update({f"{name}_scale_inv": part[1] for name, part in parts.items()}))
    edit(pair[1], lambda tensors: tensors.update({name: part[2] for name, part in parts.items()}))
    config = json.loads((pair[0] / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
    (pair[0] / "config.json").write_text(json.dumps(config))
    return pair[0], pair[1]


@pytest.fixture
def fp8(folders, tmp_path) -> Path:
    """A copy that a test may spoil."""
    folder = tmp_path / "fp8"
    folder.mkdir()
    for path in folders[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_that_of_the_dequantised_weights(folders, dtype):
    """Latent projections, dense layers, experts and the expansion that is absorbed: all of them are FP8 here."""
    logits, expected = (
        whole_prompt_logits(load_model(folder, dtype, CPU, progress=False), PROMPT) for folder in folders
    )
    assert torch.equal(logits, expected)


def test_the_mtp_module_too(folders):
    """E04: its after-load work is the target's."""
    projections = []
    for folder in folders:
        target = load_model(folder, torch.float32, CPU, progress=False)
        module = load_mtp(folder, target, torch.float32, CPU, progress=False).layers[0]
        projections.append(module.eh_proj(torch.eye(128)))
    assert torch.equal(*projections)
    assert projections[0].abs().max() > 0.5


@pytest.mark.parametrize(
    "part",
    [
        (slice(0, 112), slice(0, 32)),
        (slice(5, 6), slice(31, 32)),
        (slice(13, 50), slice(7, 29)),
        (slice(16, 48), slice(24, 32)),
        (slice(56, 112), slice(0, 16)),
    ],
)
def test_a_rank_may_read_any_part(folders, part):
    """Shares of tensor-parallel ranks begin and end inside blocks."""
    tensors = pair_with_scales(read_weight_index(folders[0]), BLOCK)
    expected = load_file(folders[1] / "model.safetensors")[KV_B][part]
    out = torch.full(expected.shape, torch.nan)
    tensors[KV_B].read_into(part, out)
    assert torch.equal(out, expected)


def test_a_row_of_blocks_is_widened_at_a_time(folders, monkeypatch):
    """Beside the model there is a tensor in FP8 and a row of its blocks, never a second copy in another dtype."""
    sizes = []
    widen = torch.Tensor.float

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.shape[0])
        return widen(tensor)

    tensors = pair_with_scales(read_weight_index(folders[0]), BLOCK)
    monkeypatch.setattr(torch.Tensor, "float", counted)
    tensors[KV_B].read_into((slice(0, 112), slice(0, 32)), torch.empty(112, 32, dtype=torch.bfloat16))
    assert sizes == [16] * 7


def test_weights_stay_fp8_where_kernels_read_them_so(folders, monkeypatch):
    """Served by the twins here: matrices, experts and the module's projection as stored, the rest dequantised."""
    fp8, fp32 = folders
    monkeypatch.setattr(ops, "reads_block_scaled", lambda device, block_size: block_size == BLOCK)
    model = load_model(fp8, torch.float32, CPU, progress=False)
    kinds = {
        name: type(value)
        for name, module in model.named_modules()
        for value in vars(module).values()
        if isinstance(value, PackedWeight | BlockScaledWeight)
    }
    scaled = {name.removeprefix("model.layers.1.") for name, kind in kinds.items() if kind is BlockScaledWeight}
    assert {"self_attn.o_proj", "self_attn.q_b_proj", "mlp.experts.down_proj", "mlp.shared_experts.down_proj"} <= scaled
    # Its second part begins at row 24, in the middle of a block of 16; so do the second parts of these.
    assert not scaled & {"self_attn.q_kv_a_proj", "mlp.experts.gate_up_proj", "mlp.gate", "self_attn.kv_b_proj"}
    expected = whole_prompt_logits(load_model(fp32, torch.float32, CPU, progress=False), PROMPT)
    torch.testing.assert_close(whole_prompt_logits(model, PROMPT), expected, atol=1e-4, rtol=1e-4)
    module = load_mtp(fp8, model, torch.float32, CPU, progress=False).layers[0]
    assert isinstance(module.eh_proj.weight, BlockScaledWeight)
    target = load_model(fp32, torch.float32, CPU, progress=False)
    expected = load_mtp(fp32, target, torch.float32, CPU, progress=False).layers[0].eh_proj(torch.eye(128))
    torch.testing.assert_close(module.eh_proj(torch.eye(128)), expected)


def test_a_part_that_begins_with_a_block_keeps_its_scales(folders, monkeypatch):
    """Merged matrices and a rank's share: gate and up of 96 rows each, of which two ranks hold 48."""
    monkeypatch.setattr(ops, "reads_block_scaled", lambda device, block_size: True)
    stored = load_file(folders[1] / "model.safetensors")
    name = "model.layers.0.mlp.{}_proj.weight"
    for rank in range(2):
        monkeypatch.setattr(parallel, "_group", parallel.TensorParallelGroup(rank, 2))
        mlp = load_model(folders[0], torch.float32, CPU, progress=False).model.layers[0].mlp
        rows = slice(48 * rank, 48 * rank + 48)
        expected = torch.cat([stored[name.format(part)][rows] for part in ("gate", "up")])
        assert isinstance(mlp.gate_up_proj.weight, BlockScaledWeight)
        assert torch.equal(ops.unpack_weight(mlp.gate_up_proj.weight), expected)
        assert isinstance(mlp.down_proj.weight, BlockScaledWeight)
        assert torch.equal(ops.unpack_weight(mlp.down_proj.weight), stored[name.format("down")][:, rows])


def test_the_block_size_is_read_from_the_configuration(folders):
    assert read_model_config(folders[0]).weight_block_size == BLOCK
    assert read_model_config(folders[1]).weight_block_size == (128, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.update({f"{KV_B}_scale_inv": torch.ones(7, 3)}),
            rf"model.safetensors: {KV_B}_scale_inv is F32 \[7, 3\]; use .* F32 \[7, 2\], .* of 16 x 24 .*\[112, 32\]",
        ),
        (
            lambda tensors: tensors.update({f"{KV_B}_scale_inv": torch.ones(7, 2, dtype=torch.bfloat16)}),
            rf"{KV_B}_scale_inv is BF16 \[7, 2\]",
        ),
        (
            lambda tensors: tensors.pop(f"{KV_B}_scale_inv"),
            rf"model.safetensors: {KV_B} is FP8 \(F8_E4M3\) without {KV_B}_scale_inv: use a checkpoint with one scale",
        ),
        (
            lambda tensors: tensors.update({KV_B: torch.ones(112, 32)}),
            rf"{KV_B} is stored as F32 \[112, 32\], and {KV_B}_scale_inv is there: use a checkpoint in",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weights_scale_inv": torch.ones(1)}),
            r"model.norm.weights_scale_inv scales model.norm.weights, which the checkpoint does not hold",
        ),
        (lambda tensors: tensors.pop(KV_B), rf"{KV_B}_scale_inv scales {KV_B}, which the checkpoint does not hold"),
    ],
)
def test_scales_that_do_not_fit(fp8, change, message):
    edit(fp8, change)
    with pytest.raises(ValueError, match=message):
        load_model(fp8, None, CPU, progress=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "awq"}, r'config.json, quantization_config: quant_method is "awq"; only "fp8"'),
        ({"fmt": "e5m2"}, r'fmt is "e5m2"; only "e4m3"'),
        ({"activation_scheme": "static"}, r'activation_scheme is "static"; only "dynamic"'),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]; two sizes are needed"),
        ({"weight_block_size": None}, r"weight_block_size is missing; a list of positive integers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]; a list of positive integers"),
    ],
)
def test_other_quantisations_are_refused(fp8, fields, message):
    path = fp8 / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_model(fp8, None, CPU, progress=False)
