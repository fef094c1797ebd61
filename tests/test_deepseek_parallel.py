"""Tensor-parallel ranks of DeepSeek: heads and every expert's intermediate features are shared out, latents are not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from kernels import ops
from models.drafters.deepseek_mtp import load_mtp
from models.layers.moe import ExpertShare
from models.loader import load_model
from models.parallel import TensorParallelGroup, set_tensor_parallel_group
from tests.helpers.paged_runner import PagedRunner
from tests.helpers.rank_processes import process_group
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_checkpoint
from tests.test_deepseek_mtp import ModuleRunner

CPU = torch.device("cpu")
PROMPT = torch.randint(VOCAB_SIZE, (34,), generator=torch.Generator().manual_seed(0)).tolist()
HIDDEN = torch.randn(34, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_rank_again() -> Iterator[None]:
    yield
    set_tensor_parallel_group(TensorParallelGroup())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    return make_tiny_checkpoint(folder, "deepseek_v3", with_tokenizer=False, num_nextn_predict_layers=1)


def test_each_rank_loads_its_share(folder):
    stored = load_file(folder / "model.safetensors")
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    for rank in range(2):
        set_tensor_parallel_group(TensorParallelGroup(rank, 2))
        model = load_model(folder, None, CPU, progress=False)
        layer = model.model.layers[1]
        assert model.kv_specs()[1].shapes == ((40,),), "every rank caches the whole latent"
        kv_b = stored[f"{attention}kv_b_proj.weight"].view(4, 28, 32)[2 * rank : 2 * rank + 2]
        expansion = layer.self_attn.kv_b_proj
        assert torch.equal(ops.unpack_weight(expansion.key_weight), kv_b[:, :16].transpose(1, 2))
        assert torch.equal(ops.unpack_weight(expansion.value_weight), kv_b[:, 16:])
        columns = slice(10 * rank, 10 * rank + 10)
        gate_up, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
        for expert in range(8):
            gate, up, out = (stored[f"{mlp}experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            assert torch.equal(ops.unpack_weight(gate_up.weight)[expert], torch.cat((gate[columns], up[columns])))
            assert torch.equal(ops.unpack_weight(down.weight)[expert], out[:, columns])


def compute(folder: Path) -> torch.Tensor:
    """Logits of a prompt and of decodes, then of the module's drafts behind each."""
    target = load_model(folder, None, CPU, progress=False)
    runner, module = PagedRunner(target), ModuleRunner(load_mtp(folder, target, torch.float32, CPU, False), 0, seed=0)
    logits = [runner.step({0: chunk})[0] for chunk in (PROMPT[:30], PROMPT[30:31], PROMPT[31:])]
    outputs = [module.step({0: PROMPT[:30]}, {0: HIDDEN[:30]})[0], module.step({0: PROMPT[30:]}, {0: HIDDEN[30:]})[0]]
    return torch.cat([*logits, module.mtp.logits(0, torch.cat(outputs))])


def compute_as_rank(rank: int, folder: Path, work: Path, expert_parallel: bool) -> None:
    with process_group(rank, 2, work) as group:
        set_tensor_parallel_group(replace(group, expert_parallel=expert_parallel))
        torch.save(compute(folder), work / f"rank{rank}.pt")


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_compute_what_one_does(folder, tmp_path, expert_parallel):
    """E09: the module's experts are shared out as the target's are."""
    expected = compute(folder)
    assert expected.shape == (68, VOCAB_SIZE)
    mp.spawn(compute_as_rank, (folder, tmp_path, expert_parallel), nprocs=2)
    torch.testing.assert_close(torch.load(tmp_path / "rank0.pt"), expected, rtol=1e-4, atol=1e-4)
    assert torch.load(tmp_path / "rank1.pt").shape == (0, VOCAB_SIZE), "logits are rank 0's alone"


def test_whole_experts_are_shared_out_among_ranks(folder):
    stored = load_file(folder / "model.safetensors")
    for rank in range(2):
        set_tensor_parallel_group(TensorParallelGroup(rank, 2, expert_parallel=True))
        experts = load_model(folder, None, CPU, progress=False).model.layers[1].mlp.experts
        for held in range(4):
            prefix = f"model.layers.1.mlp.experts.{4 * rank + held}."
            gate, up, down = (stored[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
            assert torch.equal(ops.unpack_weight(experts.gate_up_proj.weight)[held], torch.cat((gate, up)))
            assert torch.equal(ops.unpack_weight(experts.down_proj.weight)[held], down)


def test_experts_that_ranks_cannot_share_are_refused(folder):
    set_tensor_parallel_group(TensorParallelGroup(0, 3, expert_parallel=True))
    with pytest.raises(ValueError, match="n_routed_experts is 8, which tensor_parallel_size 3 does not divide"):
        ExpertShare.of_rank(8)
