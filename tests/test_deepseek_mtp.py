"""The modules of multi-token prediction: their mathematics, and which tensors of a checkpoint they are made of."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.metadata import AttentionMetadata
from models.causal_lm import CausalLM
from models.drafters import deepseek_mtp
from models.drafters.deepseek_mtp import DeepseekMTP, load_mtp
from models.loader import load_model
from tests.helpers.direct_deepseek import DirectDeepseek
from tests.helpers.paged_runner import PagedRunner
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_checkpoint

CPU = torch.device("cpu")
LENGTHS = (33, 5, 12)
SEQUENCES = [np.random.default_rng(i).integers(0, VOCAB_SIZE, length).tolist() for i, length in enumerate(LENGTHS)]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(folder: Path, **fields: bool) -> tuple[CausalLM, DeepseekMTP]:
    target = load_model(folder, None, CPU, progress=False)
    return target, load_mtp(folder, target, torch.float32, CPU, progress=False, **fields)


def edit(folder: Path, change) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three modules, each with an embedding and a head of its own."""
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("mtp"), "deepseek_v3", with_tokenizer=False, num_nextn_predict_layers=3
    )

    def own_matrices(tensors: dict[str, torch.Tensor]) -> None:
        for i in (2, 3, 4):
            tensors[f"model.layers.{i}.embed_tokens.weight"] += 0.1 * i
            tensors[f"model.layers.{i}.shared_head.head.weight"] *= 1 - 0.1 * i

    return edit(folder, own_matrices)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Two modules with copies of the target's embedding and head."""
    return make_tiny_checkpoint(tmp_path / "mtp", "deepseek_v3", with_tokenizer=False, num_nextn_predict_layers=2)


class ModuleRunner:
    """Runs one module over a paged pool in chunks, with `PagedRunner`'s layout."""

    def __init__(self, mtp: DeepseekMTP, module: int, seed: int) -> None:
        self.mtp, self.module = mtp, module
        self.runner = PagedRunner(self, num_blocks=64, block_size=4, seed=seed)
        self.inputs: torch.Tensor | None = None

    def kv_specs(self):
        return [self.mtp.kv_specs()[self.module]]

    def __call__(self, token_ids, positions, kv_layers, attention) -> torch.Tensor:
        return self.mtp(self.module, token_ids, self.inputs, positions, kv_layers[0], attention)

    def compute_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs  # the runner's answer is what the module gives out

    def step(self, token_ids: dict[int, list[int]], hidden_states: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        self.inputs = torch.cat([hidden_states[seq] for seq in token_ids])
        return self.runner.step(token_ids)


def test_the_direct_form_of_the_target_is_that_of_transformers(folder):
    """What the modules are held against is itself right as far as transformers can tell."""
    target, _ = load(folder)
    logits = PagedRunner(target).step({0: SEQUENCES[0]})[0]
    torch.testing.assert_close(logits, DirectDeepseek(folder).logits(SEQUENCES[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 40])
def test_every_module_in_chunks_gives_what_the_equations_give(folder, chunk):
    """Module j at p is given module j - 1 at p and token p + 1 + j; sequences of a batch end at different rows."""
    _, mtp = load(folder)
    direct = DirectDeepseek(folder)
    given = [direct.hidden_states(sequence) for sequence in SEQUENCES]
    for module in range(mtp.num_modules):
        runner, outputs = ModuleRunner(mtp, module, seed=module), [[] for _ in SEQUENCES]
        num_rows = [length - 1 - module for length in LENGTHS]
        for start in range(0, max(num_rows), chunk):
            ends = {i: min(start + chunk, num) for i, num in enumerate(num_rows) if start < num}
            tokens = {i: SEQUENCES[i][start + 1 + module : end + 1 + module] for i, end in ends.items()}
            for i, rows in runner.step(tokens, {i: given[i][start:end] for i, end in ends.items()}).items():
                outputs[i].append(rows)
        for i, num in enumerate(num_rows):
            ours = torch.cat(outputs[i])
            expected = direct.module_outputs(module, SEQUENCES[i][1 + module :], given[i][:num])
            for mine, theirs in (
                (ours, direct.recycled(module, expected)),
                (mtp.logits(module, ours), direct.draft_logits(module, expected)),
            ):
                torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)
            given[i] = direct.recycled(module, expected)


def one_row_each(positions: list[int], slots: list[int]) -> tuple[torch.Tensor, AttentionMetadata]:
    num_rows = len(positions)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=torch.tensor([0 if slot < 0 else 1 for slot in slots], dtype=torch.int32),
        block_tables=torch.arange(num_rows, dtype=torch.int32)[:, None],
        slot_mapping=torch.tensor(slots),
        max_seqlen_q=1,
        max_context_len=1,
    )
    return torch.tensor(positions), metadata


def test_the_first_position_sees_no_token_and_padding_rows_are_harmless(checkpoint):
    """The mask is read off `positions` on the device: it holds for whatever rows a captured graph is replayed on."""
    _, mtp = load(checkpoint)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    positions, metadata = one_row_each([0, 7, 0, 0], [0, 5, -1, -1])  # two rows, two of padding

    def run(token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        pool = torch.full((4, 4, 40), 77.0)
        outputs = mtp(0, torch.tensor(token_ids), hidden, positions, (pool,), metadata)
        assert outputs.isfinite().all()
        return outputs, pool

    outputs, pool = run([3, 4, 5, 6])
    assert (pool.flatten(0, 1)[[1, 2, 3, 4, *range(6, 16)]] == 77).all(), "only the two real slots are written"
    others, _ = run([30, 40, 50, 60])
    assert torch.equal(outputs[[0, 2, 3]], others[[0, 2, 3]])
    assert not torch.equal(outputs[1], others[1])


def test_the_order_of_the_inputs_is_the_familys(checkpoint, monkeypatch):
    """A family that joins [hidden, embedding] with its projection's halves exchanged computes the same."""
    positions, metadata = one_row_each([3, 9], [0, 4])
    hidden, token_ids = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([8, 9])
    _, mtp = load(checkpoint)
    expected = mtp(1, token_ids, hidden, positions, (torch.zeros(2, 4, 40),), metadata)

    edit(checkpoint, lambda tensors: tensors.update({name: tensors[name].roll(64, dims=1) for name in PROJECTIONS}))
    family = deepseek_mtp.FAMILIES["DeepseekV3ForCausalLM"]
    reversed_family = replace(family, embedding_first=False)
    monkeypatch.setitem(deepseek_mtp.FAMILIES, "DeepseekV3ForCausalLM", reversed_family)
    _, mtp = load(checkpoint)
    reversed_outputs = mtp(1, token_ids, hidden, positions, (torch.zeros(2, 4, 40),), metadata)
    torch.testing.assert_close(reversed_outputs, expected, atol=1e-5, rtol=1e-5)


PROJECTIONS = [f"model.layers.{i}.eh_proj.weight" for i in (2, 3)]


def test_copies_of_the_targets_embedding_and_head_are_not_kept(checkpoint):
    target, mtp = load(checkpoint)
    assert mtp.num_modules == 2
    assert [spec.shapes for spec in mtp.kv_specs()] == [((40,),)] * 2
    assert all(module.embed_tokens is None and module.head is None for module in mtp.layers)
    names = {name.split(".")[2] for name, _ in mtp.named_modules() if name.count(".") >= 2}
    assert not names & {"embed_tokens", "lm_head"}, "the target's are no parameters of the drafter"
    outputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(mtp.logits(0, outputs), target.compute_logits(outputs))


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_absent_copies_are_the_targets(checkpoint, name):
    """E01: a head that the checkpoint does not repeat is borrowed, never random."""
    expected = draft_logits(checkpoint)
    edit(checkpoint, lambda tensors: [tensors.pop(f"model.layers.{i}.{name}.weight") for i in (2, 3)])
    assert torch.equal(draft_logits(checkpoint), expected)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_own_matrices_are_kept_where_they_differ_by_a_single_entry(checkpoint, name):
    """E02: the last row of the second module's only; the first module goes on sharing."""
    full = f"model.layers.3.{name}.weight"
    expected = draft_logits(checkpoint)
    edit(checkpoint, lambda tensors: tensors[full][-1].mul_(-2))
    _, mtp = load(checkpoint)
    own = [module.embed_tokens if name == "embed_tokens" else module.head for module in mtp.layers]
    assert own[0] is None
    assert own[1] is not None
    changed = draft_logits(checkpoint)
    assert torch.equal(changed[0], expected[0])
    assert not torch.equal(changed[1], expected[1])


def draft_logits(folder: Path) -> torch.Tensor:
    """Of both modules, for the last token of the vocabulary: [2, 1, vocab_size]."""
    _, mtp = load(folder)
    positions, metadata = one_row_each([3], [0])
    hidden, token_ids = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([VOCAB_SIZE - 1])
    outputs = [mtp(i, token_ids, hidden, positions, (torch.zeros(1, 4, 40),), metadata) for i in range(2)]
    return torch.stack([mtp.logits(i, rows) for i, rows in enumerate(outputs)])


def test_which_hidden_states_are_given_and_recycled_are_fields(checkpoint):
    target, mtp = load(checkpoint)
    assert (mtp.hidden_is_normed, mtp.recycled_is_normed, target.hidden_is_normed) == (True, True, True)
    logits = PagedRunner(target).step({0: SEQUENCES[0]})[0]
    raw_target, raw = load(checkpoint, hidden_is_normed=False, recycled_is_normed=False)
    assert not raw_target.hidden_is_normed
    assert torch.equal(PagedRunner(raw_target).step({0: SEQUENCES[0]})[0], logits), "logits are the same either way"
    normed, unnormed = (hidden_of(model, SEQUENCES[1]) for model in (target, raw_target))
    torch.testing.assert_close(target.model.norm(unnormed), normed)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    positions, metadata = one_row_each([3, 9, 1], [0, 4, 8])
    outputs, raw_outputs = (
        module(1, torch.tensor([7, 8, 9]), hidden, positions, (torch.zeros(3, 4, 40),), metadata)
        for module in (mtp, raw)
    )
    torch.testing.assert_close(outputs, mtp.layers[1].norm(raw_outputs))
    assert not torch.allclose(outputs, raw_outputs)
    torch.testing.assert_close(mtp.logits(1, outputs), raw.logits(1, raw_outputs))


def hidden_of(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
    runner, caught = PagedRunner(model), []
    forward = model.forward
    model.forward = lambda *args: caught.append(forward(*args)) or caught[-1]
    try:
        runner.step({0: token_ids})
    finally:
        del model.forward
    return caught[0]


def drop_modules(folder: Path, first: int) -> None:
    prefixes = tuple(f"model.layers.{i}." for i in range(2 + first, 4))
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefixes)])


def test_a_checkpoint_without_its_module(checkpoint):
    drop_modules(checkpoint, first=1)
    with pytest.raises(ValueError, match=r"no tensor model.layers.3.\*, module 1 of the 2 .*config.json promises"):
        load(checkpoint)


@pytest.mark.parametrize(
    "name", ["eh_proj.weight", "shared_head.norm.weight", "mlp.experts.5.up_proj.weight", "self_attn.kv_b_proj.weight"]
)
def test_half_a_module(checkpoint, name):
    """E03: nothing is left at an initial value."""
    edit(checkpoint, lambda tensors: tensors.pop(f"model.layers.2.{name}"))
    with pytest.raises(
        ValueError, match=rf"module 0 .*{checkpoint}.*missing: model.layers.2.{name}; .*whole of its MTP"
    ):
        load(checkpoint)


def test_a_renamed_tensor_of_a_module(checkpoint):
    edit(
        checkpoint,
        lambda tensors: tensors.update({"model.layers.2.e_norm.weight": tensors.pop("model.layers.2.enorm.weight")}),
    )
    with pytest.raises(ValueError, match=r"missing: model.layers.2.enorm.weight; unexpected: model.layers.2.e_norm"):
        load(checkpoint)


@pytest.mark.parametrize("value", [0, None])
def test_a_configuration_that_counts_no_modules(checkpoint, value):
    edit_config(checkpoint, num_nextn_predict_layers=value)
    drop_modules(checkpoint, first=0)
    with pytest.raises(ValueError, match=r"config.json: num_nextn_predict_layers is 0 or missing, .*choose another"):
        load(checkpoint)


def test_a_target_of_another_architecture(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    with pytest.raises(ValueError, match=r'config.json: architectures is \["LlamaForCausalLM"\], which has no modules'):
        load(folder)


def test_the_target_passes_over_the_modules_that_its_configuration_counts(checkpoint):
    """Known extras; a third module that nobody counted is not one."""
    edit_config(checkpoint, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"missing: none; unexpected: model.layers.3.eh_proj.weight, "):
        load_model(checkpoint, None, CPU, progress=False)


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
