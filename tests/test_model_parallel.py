"""Tensor-parallel shares: ranks load disjoint parts of the weights, and together compute what one rank does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn

from kernels import ops
from models.layers.linear import ColumnParallelLinear, QKVParallelLinear
from models.loader import load_model
from models.parallel import TensorParallelGroup, set_tensor_parallel_group
from tests.helpers.paged_runner import PagedRunner, whole_prompt_logits
from tests.helpers.rank_processes import process_group
from tests.helpers.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = [7, 250, 31, 299, 0, 12, 140, 3]


@pytest.fixture(autouse=True)
def _one_rank_again() -> Iterator[None]:
    yield
    set_tensor_parallel_group(TensorParallelGroup())


def plain(module: nn.Module) -> torch.Tensor:
    """The weight of a module, unpacked."""
    return ops.linear(torch.eye(module.weight.shape[1]), module.weight).T


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_loads_its_share(tmp_path, size):
    """With 4 ranks and 2 KV heads, two ranks hold the same KV head."""
    folder = make_tiny_checkpoint(tmp_path, "llama_bias", with_tokenizer=False)
    stored = load_file(folder / "model.safetensors")
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."

    def share(name: str, rank: int, num_shares: int = size, dim: int = 0) -> torch.Tensor:
        return stored[name].chunk(num_shares, dim)[rank]

    for rank in range(size):
        set_tensor_parallel_group(TensorParallelGroup(rank, size))
        model = load_model(folder, None, CPU, progress=False)
        layer = model.model.layers[1]
        kv_rank = rank * 2 // size
        for parameter in ("weight", "bias"):
            expected = torch.cat(
                [
                    share(f"{attention}q_proj.{parameter}", rank),
                    share(f"{attention}k_proj.{parameter}", kv_rank, 2),
                    share(f"{attention}v_proj.{parameter}", kv_rank, 2),
                ]
            )
            loaded = plain(layer.self_attn.qkv_proj) if parameter == "weight" else layer.self_attn.qkv_proj.bias
            torch.testing.assert_close(loaded, expected)
        assert model.kv_specs()[1].shapes == ((1, 24), (1, 24))
        torch.testing.assert_close(plain(layer.self_attn.o_proj), share(f"{attention}o_proj.weight", rank, dim=1))
        torch.testing.assert_close(layer.self_attn.o_proj.bias, stored[f"{attention}o_proj.bias"])
        gate_up = torch.cat([share(f"{mlp}{name}_proj.weight", rank) for name in ("gate", "up")])
        torch.testing.assert_close(plain(layer.mlp.gate_up_proj), gate_up)
        torch.testing.assert_close(plain(layer.mlp.down_proj), share(f"{mlp}down_proj.weight", rank, dim=1))
        torch.testing.assert_close(plain(model.model.embed_tokens), share("model.embed_tokens.weight", rank))
        torch.testing.assert_close(plain(model.lm_head), share("lm_head.weight", rank))
        torch.testing.assert_close(model.model.norm.weight, stored["model.norm.weight"])


def test_a_column_parallel_layer_holds_its_rows():
    set_tensor_parallel_group(TensorParallelGroup(rank=2, size=3))
    layer = ColumnParallelLinear(8, 12, bias=True, dtype=torch.float32, name="intermediate_size")
    assert layer.weight.shape == (4, 8)
    (shard,) = layer.weight.shards
    assert (shard.stored_shape, shard.part, shard.rows) == ((12, 8), (slice(8, 12), slice(0, 8)), slice(0, 4))
    (shard,) = layer.bias.shards
    assert (shard.stored_shape, shard.part, shard.rows) == ((12,), (slice(8, 12),), slice(0, 4))


def test_sizes_that_ranks_cannot_share_are_refused(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, with_tokenizer=False)
    set_tensor_parallel_group(TensorParallelGroup(rank=0, size=7))
    with pytest.raises(ValueError, match="vocab_size is 300, which tensor_parallel_size 7 does not divide"):
        load_model(folder, None, CPU, progress=False)
    set_tensor_parallel_group(TensorParallelGroup(rank=0, size=3))
    with pytest.raises(ValueError, match="num_key_value_heads is 2, tensor_parallel_size 3: one must divide the other"):
        QKVParallelLinear(64, num_heads=6, num_kv_heads=2, head_dim=8, bias=False, dtype=torch.float32)


# What ranks share in a way of its own: biases, one embedding that is the head as well, norms of heads, a window.
SHARED = {
    "llama with biases": ("llama_bias", {}),
    "one KV head for both ranks": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def compute_as_rank(rank: int, work: Path) -> None:
    with process_group(rank, 2, work) as group:
        set_tensor_parallel_group(group)
        for name in SHARED:
            runner = PagedRunner(load_model(work / name, None, CPU, progress=False))
            chunks = [runner.step({0: PROMPT[:5]})[0], runner.step({0: PROMPT[5:]})[0]]
            torch.save(torch.cat(chunks), work / name / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> Path:
    """A folder a case: its checkpoint, and the logits of each rank."""
    work = tmp_path_factory.mktemp("ranks")
    for name, (architecture, fields) in SHARED.items():
        make_tiny_checkpoint(work / name, architecture, with_tokenizer=False, **fields)
    mp.spawn(compute_as_rank, (work,), nprocs=2)
    return work


@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_compute_the_logits_of_one(computed, name):
    expected = whole_prompt_logits(load_model(computed / name, None, CPU, progress=False), PROMPT)
    torch.testing.assert_close(torch.load(computed / name / "rank0.pt"), expected, rtol=1e-4, atol=1e-4)
    assert torch.load(computed / name / "rank1.pt").shape == (0, expected.shape[1]), "logits are rank 0's alone"
