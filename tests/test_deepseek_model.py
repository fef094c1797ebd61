"""DeepSeek's target side: latent attention in both forms, the router, and experts that idle for nothing."""

import pytest
import torch
import torch.nn.functional as F

from kernels import ops, reference_linear
from kernels.cpu import grouped_linear as cpu_grouped_linear
from models.causal_lm import CausalLM
from models.layers import latent_attention
from models.layers.latent_attention import LatentAttention, naive_rows
from models.layers.moe import Experts
from models.layers.parameter import set_loaded
from models.layers.router import Router
from models.loader import load_model
from models.model_config import LatentAttentionConfig, MoEConfig
from tests.helpers.attention_case import ragged_metadata
from tests.helpers.paged_runner import PagedRunner, whole_prompt_logits
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0)).tolist()
NAIVE_ROWS = 25  # of the tiny checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> CausalLM:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("deepseek"), "deepseek_v3_yarn", with_tokenizer=False)
    return load_model(folder, None, CPU, progress=False)


@pytest.fixture
def _both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, or where there is no compiler."""
    monkeypatch.setattr(ops, "is_row_invariant", lambda x: False)


class Forms:
    """Counts the sequences that are attended to in each form, in the model's first layer."""

    def __init__(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seqs = {"naive": 0, "absorbed": 0}
        attention = model.model.layers[0].self_attn
        for form in self.seqs:
            self._count(attention, form, monkeypatch)

    def _count(self, attention: LatentAttention, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        attend = getattr(attention, f"attend_{form}")

        def counted(query_nope, query_rope, latent_cache, metadata):
            self.seqs[form] += len(metadata.context_lens)
            return attend(query_nope, query_rope, latent_cache, metadata)

        monkeypatch.setattr(attention, f"attend_{form}", counted)

    def take(self) -> tuple[int, int]:
        counts = self.seqs["naive"], self.seqs["absorbed"]
        self.seqs = dict.fromkeys(self.seqs, 0)
        return counts


@pytest.mark.usefixtures("_both_forms")
def test_the_form_is_chosen_by_a_sequences_own_rows(model, monkeypatch):
    forms, runner = Forms(model, monkeypatch), PagedRunner(model)
    runner.step({0: PROMPT[:NAIVE_ROWS]})
    assert forms.take() == (1, 0)
    runner.step({0: PROMPT[NAIVE_ROWS : NAIVE_ROWS + 4]})
    assert forms.take() == (0, 1), "a verification"
    runner.step({1: PROMPT[: NAIVE_ROWS - 1]})
    assert forms.take() == (0, 1)
    runner.step({0: PROMPT[30:31], 2: PROMPT[:40], 1: PROMPT[24:26], 3: PROMPT[:30]})
    assert forms.take() == (2, 2)
    # A context whose expansion would not fit is attended to where it is.
    monkeypatch.setattr(latent_attention, "MAX_EXPANDED_ENTRIES", 2 * 24 * 4 * 59)
    runner.step({4: PROMPT[:30], 2: PROMPT[40:41]})
    assert forms.take() == (1, 1)
    runner.step({4: PROMPT[30:60]})
    assert forms.take() == (0, 1)


def test_kernels_that_promise_a_rows_bits_are_given_one_form(model, monkeypatch):
    forms = Forms(model, monkeypatch)
    monkeypatch.setattr(ops, "is_row_invariant", lambda x: True)
    PagedRunner(model).step({0: PROMPT})
    assert forms.take() == (0, 1)


@pytest.mark.usefixtures("_both_forms")
def test_naive_is_absorbed(model, monkeypatch):
    """In fp32, over chunks of any size."""
    logits = {}
    for rows in (1, None):
        for layer in model.model.layers:
            monkeypatch.setattr(layer.self_attn, "naive_rows", rows)
        runner = PagedRunner(model, seed=3)
        chunks = [PROMPT[:33], PROMPT[33:34], PROMPT[34:40], PROMPT[40:]]
        logits[rows] = torch.cat([runner.step({0: chunk})[0] for chunk in chunks])
    torch.testing.assert_close(logits[1], logits[None], atol=2e-5, rtol=2e-5)
    assert not torch.equal(logits[1], logits[None]), "they are two computations"


@pytest.mark.usefixtures("_both_forms")
def test_greedy_ids_are_those_of_one_form_however_prompts_are_cut(model, monkeypatch):
    """In fp32 forms differ by rounding alone, by a millionth of what parts the two best tokens."""

    def generate(chunk: int) -> list[int]:
        runner, known = PagedRunner(model, block_size=8), PROMPT[:50]
        for start in range(0, 50, chunk):
            logits = runner.step({0: known[start : start + chunk]})[0]
        for _ in range(40):
            known = [*known, int(logits[-1].argmax())]
            logits = runner.step({0: known[-1:]})[0]
        return known

    mixed = [generate(chunk) for chunk in (50, 30, 11)]
    monkeypatch.setattr(ops, "is_row_invariant", lambda x: True)
    assert mixed == [generate(50)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(tmp_path, dtype):
    """Decodes, verifications and chunks: neither batch mates nor how a prompt was cut enter experts' or heads' sums."""
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3", with_tokenizer=False)
    model = load_model(folder, dtype, CPU, progress=False)
    if isinstance(model.lm_head.weight, torch.Tensor):
        pytest.skip("torch's products depend on the number of rows; the compiled kernels do not")
    together, apart = PagedRunner(model), [PagedRunner(model, seed=seed) for seed in range(3)]
    steps = [
        {0: PROMPT[:40], 1: PROMPT[5:8], 2: PROMPT[:30]},
        {0: PROMPT[40:41], 1: PROMPT[8:9], 2: PROMPT[30:33]},
        {0: PROMPT[41:45], 1: PROMPT[9:50], 2: PROMPT[33:34]},
    ]
    for step in steps:
        for seq, rows in together.step(step).items():
            halves = step[seq][: len(rows) // 2], step[seq][len(rows) // 2 :]
            expected = torch.cat([apart[seq].step({seq: half})[seq] for half in halves if half])
            assert torch.equal(rows, expected)


def test_a_verification_has_the_bits_of_decodes_one_by_one(model):
    if isinstance(model.lm_head.weight, torch.Tensor):
        pytest.skip("torch's products depend on the number of rows; the compiled kernels do not")
    verified, decoded = PagedRunner(model), PagedRunner(model, seed=5)
    for runner in (verified, decoded):
        runner.step({0: PROMPT[:30]})
    rows = verified.step({0: PROMPT[30:36]})[0]
    one_by_one = [decoded.step({0: [token]})[0] for token in PROMPT[30:36]]
    assert torch.equal(rows, torch.cat(one_by_one))


def test_where_the_naive_form_begins():
    v3 = LatentAttentionConfig(1536, 512, 128, 64, 128, softmax_scale=1.0, bias=False)
    assert v3.cached_dim == 576
    assert naive_rows(v3) == 171
    # A latent no wider than a head's key and value is never worth an expansion.
    assert naive_rows(LatentAttentionConfig(None, 64, 64, 64, 64, softmax_scale=1.0, bias=False)) is None


def test_only_the_latent_is_cached(model):
    assert [spec.shapes for spec in model.kv_specs()] == [((40,),)] * 2
    assert model.kv_specs()[0].token_bytes == 160


def test_kv_b_proj_is_kept_once(tmp_path):
    """fp16 is served by torch: both halves are views of the loaded matrix."""
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3", with_tokenizer=False)
    expansion = load_model(folder, torch.float16, CPU, progress=False).model.layers[0].self_attn.kv_b_proj
    names = [name for name, _ in expansion.named_parameters()]
    assert names == ["key_weight", "value_weight"]
    pointers = {parameter.untyped_storage().data_ptr() for parameter in expansion.parameters()}
    assert len(pointers) == 1


def test_yarns_softmax_scale_and_groups_and_bias_matter(tmp_path):
    """Parity would not hold by accident."""
    base = make_tiny_checkpoint(tmp_path / "base", "deepseek_v3_yarn", with_tokenizer=False)
    expected = whole_prompt_logits(load_model(base, None, CPU, progress=False), PROMPT)
    model = load_model(base, None, CPU, progress=False)
    for layer in model.model.layers:
        attention = layer.self_attn
        scale = (attention.config.qk_head_dim) ** -0.5
        attention.config = LatentAttentionConfig(**vars(attention.config) | {"softmax_scale": scale})
    assert (whole_prompt_logits(model, PROMPT) - expected).abs().max() > 0.05
    model = load_model(base, None, CPU, progress=False)
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    assert (whole_prompt_logits(model, PROMPT) - expected).abs().max() > 0.05
    ungrouped = load_model(base, None, CPU, progress=False)
    gate = ungrouped.model.layers[1].mlp.gate
    gate.config = MoEConfig(**vars(gate.config) | {"topk_group": gate.config.n_group})
    assert (whole_prompt_logits(ungrouped, PROMPT) - expected).abs().max() > 0.05


ROUTERS = {
    "noaux_tc": {"topk_method": "noaux_tc", "norm_topk_prob": True},
    "group_limited_greedy": {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "greedy": {"topk_method": "greedy", "norm_topk_prob": False},
}


@pytest.mark.parametrize("method", ROUTERS)
def test_the_router_written_out(method):
    config = MoEConfig(
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=0,
        **ROUTERS[method],
    )
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 16, generator=generator), torch.randn(12, 16, generator=generator)
    bias = 0.3 * torch.randn(12, generator=generator)
    router = Router(config, hidden_size=16)
    set_loaded(router, "weight", weight)
    if method == "noaux_tc":
        set_loaded(router, "e_score_correction_bias", bias)
    weights, expert_ids = router(x)
    for row in range(50):
        logits = weight @ x[row]
        scores = (torch.sigmoid(logits) if method == "noaux_tc" else logits.softmax(-1)).tolist()
        choice = [s + float(b) for s, b in zip(scores, bias, strict=True)] if method == "noaux_tc" else scores
        groups = [choice[3 * g : 3 * g + 3] for g in range(4)]
        best = {"noaux_tc": lambda group: sum(sorted(group)[-2:]), "group_limited_greedy": max, "greedy": None}[method]
        kept = sorted(range(4), key=lambda g: best(groups[g]))[-2:] if best else range(4)
        candidates = [expert for expert in range(12) if expert // 3 in kept]
        chosen = sorted(candidates, key=lambda expert: choice[expert])[-3:]
        total = sum(scores[expert] for expert in chosen) if method == "noaux_tc" else 1.0
        expected = {expert: 2.5 * scores[expert] / total for expert in chosen}
        actual = dict(zip(expert_ids[row].tolist(), weights[row].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=1e-5)


def make_experts(num_experts: int, dtype: torch.dtype = torch.float32) -> tuple[Experts, torch.Tensor, torch.Tensor]:
    """Experts from 24 to 20 features and back, and their weights."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(num_experts, 40, 24, generator=generator).to(dtype)
    down = torch.randn(num_experts, 24, 20, generator=generator).to(dtype)
    experts = Experts(num_experts, 24, 20, dtype)
    set_loaded(experts.gate_up_proj, "weight", gate_up.clone())
    set_loaded(experts.down_proj, "weight", down.clone())
    return experts, gate_up, down


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_experts_one_token_and_one_expert_at_a_time(dtype, tolerance):
    experts, gate_up, down = make_experts(6, dtype)
    generator = torch.Generator().manual_seed(2)
    x, weights = torch.randn(9, 24, generator=generator).to(dtype), torch.rand(9, 2, generator=generator)
    expert_ids = torch.tensor([[0, 5], [5, 0], [2, 5], [5, 2], [0, 2], [2, 0], [5, 0], [0, 5], [2, 5]])  # 1, 3, 4 idle
    expected = torch.zeros(9, 24)
    for row in range(9):
        for choice in range(2):
            expert = int(expert_ids[row, choice])
            gate, up = (gate_up[expert].float() @ x[row].float()).chunk(2)
            expected[row] += weights[row, choice] * (down[expert].float() @ (F.silu(gate) * up))
    torch.testing.assert_close(experts(x, weights, expert_ids), expected, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_expert_without_tokens_costs_nothing(dtype, monkeypatch):
    """Of 64 experts and of 8, the same three are products; fp16 is served by the twin."""
    products = []
    linear, run = reference_linear.linear, cpu_grouped_linear._run

    def counted_linear(x, *rest):
        products.append(len(x))
        return linear(x, *rest)

    def counted_run(x, groups, *rest):
        products.extend(groups[:, 2].tolist())
        return run(x, groups, *rest)

    monkeypatch.setattr(reference_linear, "linear", counted_linear)
    monkeypatch.setattr(cpu_grouped_linear, "_run", counted_run)
    expert_ids = torch.tensor([[1, 7], [7, 1], [7, 3], [1, 7]])
    x, weights = torch.ones(4, 24, dtype=dtype), torch.ones(4, 2)
    seen = {}
    for num_experts in (8, 64):
        experts, _, _ = make_experts(num_experts, dtype)
        experts(x, weights, expert_ids)
        seen[num_experts], products[:] = list(products), []
    assert seen[8] == seen[64] == [3, 1, 4] * 2


def test_batched_and_grouped_products_are_those_of_the_twins():
    """Strided parts of heads, groups without rows, a row that no tile is whole with."""
    generator = torch.Generator().manual_seed(3)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        weight = torch.randn(5, 33, 17, generator=generator).to(dtype)
        packed = ops.pack_weight(weight)
        assert torch.equal(ops.unpack_weight(packed), weight)
        heads = torch.randn(13, 5, 40, generator=generator).to(dtype)[..., 3:20]
        expected = reference_linear.batched_linear(heads, weight)
        torch.testing.assert_close(ops.batched_linear(heads, packed), expected, atol=20 * tolerance, rtol=tolerance)
        rows, sizes = torch.randn(30, 17, generator=generator).to(dtype), torch.tensor([0, 13, 0, 1, 16])
        for out_dtype in (None, torch.float32):
            expected = reference_linear.grouped_linear(rows, sizes, weight, out_dtype)
            actual = ops.grouped_linear(rows, sizes, packed, out_dtype)
            assert actual.dtype == (out_dtype or dtype)
            torch.testing.assert_close(actual, expected, atol=20 * tolerance, rtol=tolerance)
        assert ops.grouped_linear(rows[:0], torch.zeros(5, dtype=torch.int64), packed).shape == (0, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_stored_and_attended_to_as_one_kv_head(dtype):
    generator = torch.Generator().manual_seed(4)
    num_rows, context_lens = [3, 1, 2], torch.tensor([9, 4, 2], dtype=torch.int32)
    block_tables = torch.tensor([[4, 1, 3], [0, 0, 0], [2, 0, 0]], dtype=torch.int32)
    metadata = ragged_metadata(num_rows, context_lens, block_tables, CPU)
    cache = torch.full((5, 4, 12), torch.nan).to(dtype)
    latents = torch.randn(20, 12, generator=generator).to(dtype)
    slots = torch.cat([torch.arange(16, 20), torch.arange(4, 8), torch.tensor([12, 0, 1, 2, 3, 8, 9, -1])])
    ops.store_latent(latents[: len(slots)], cache, slots)
    assert torch.equal(cache.flatten(0, 1)[slots[:-1]], latents[: len(slots) - 1])
    assert cache.flatten(0, 1)[[13, 14, 15, 10, 11]].isnan().all()
    query = torch.randn(6, 3, 12, generator=generator).to(dtype)
    attended = ops.latent_attention(query, cache, metadata, scale=0.4, value_dim=8)
    row = 0
    for seq, rows in enumerate(num_rows):
        context = int(context_lens[seq])
        keys = cache[block_tables[seq].long()].flatten(0, 1).float()
        for index in range(rows):
            seen = keys[: context - rows + index + 1]
            scores = 0.4 * query[row].float() @ seen.T
            expected = scores.softmax(-1) @ seen[:, :8]
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(attended[row].float(), expected, atol=tolerance, rtol=tolerance)
            row += 1
