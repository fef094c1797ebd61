"""`python -m app.plan`: what ranks hold is what the loader loads, floors are sums that can be done by hand."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from app import plan
from app.llm_engine import LLMEngine
from app.planning.checkpoint_shape import CheckpointShape, read_checkpoint_shape
from app.planning.device import DEVICES, GIB, Device, choose_device
from app.planning.expert_load import ExpertLoad
from app.planning.network_share import Layout, NetworkShare, mtp_share, target_share
from app.planning.pass_cost import pass_cost
from app.planning.planned_drafter import DRAFTERS, PlannedDrafter
from app.planning.prediction import predict, step_floor
from app.planning.report import duration, size, table
from app.speculative.registry import PROPOSERS
from app.worker_loader import weight_bytes
from models.drafters.deepseek_mtp import load_mtp
from models.loader import load_model
from models.parallel import TensorParallelGroup, set_tensor_parallel_group, tp_size
from tests.helpers.tiny_models import ARCHITECTURES

REPOSITORY = Path(__file__).resolve().parent.parent
DEEPSEEK_V3 = REPOSITORY / "tests" / "assets" / "configs" / "deepseek_v3.json"
BIG_FILES = {"deepseek_v3_mtp_1x8_h200": 8, "deepseek_v3_mtp_2x8": 16}
CPU = torch.device("cpu")
ROUND = Device("round", 100 * GIB, bandwidth=1e9, flops=1e12)  # a byte is a nanosecond

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LLAMA_LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096  # weights
LLAMA_HEAD = 128256 * 4096


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder that holds the config.json of an 8B Llama, and nothing else."""
    return write_config(tmp_path / "llama", LLAMA)


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_serve_file(tmp_path: Path, **args: Any) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "app.main:build", "args": args}]}))
    return path


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert plan.main([*map(str, arguments), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


@functools.cache
def v3_share(num_ranks: int = 1, **layout: bool) -> tuple[CheckpointShape, Layout, NetworkShare]:
    shape = read_checkpoint_shape(str(DEEPSEEK_V3), "auto")
    lies = Layout(num_ranks, **{"keeps_fp8": True, **layout})
    return shape, lies, target_share(shape, lies)


# --- what a rank holds


def test_deepseek_v3_has_the_published_sizes():
    shape, layout, target = v3_share()
    assert target.num_parameters == pytest.approx(671e9, rel=1e-3)
    active = target.body.num_elements + target.head.num_elements + target.routed.num_elements * 8 / 256
    assert active == pytest.approx(36.7e9, rel=2e-2)
    assert mtp_share(shape, layout, target).num_parameters == pytest.approx(11.5e9, rel=2e-2)


@pytest.mark.parametrize("num_ranks", [1, 8, 16])
def test_every_rank_caches_the_latents_of_all_layers(num_ranks):
    shape, layout, target = v3_share(num_ranks)
    assert {spec.token_bytes for spec in target.kv_specs} == {1152}
    assert target.token_bytes == 61 * 1152
    assert mtp_share(shape, layout, target).token_bytes == 1152


def test_deepseek_v3_in_fp8_on_sixteen_ranks():
    """Every part by its published shapes: FP8 a byte and fp32 scales a block, the rest bf16, the router fp32."""

    def fp8(rows: int, columns: int) -> int:
        return rows * columns + 4 * (-(-rows // 128) * -(-columns // 128))

    hidden, ranks = 7168, 16
    heads = 128 // ranks
    attention = fp8(1536 + 576, hidden) + 2 * (1536 + 512)  # on every rank, with the latents' norms
    attention += fp8(heads * 192, 1536) + fp8(hidden, heads * 128) + 2 * heads * 256 * 512  # kv_b_proj is bf16
    expert = fp8(2 * 2048 // ranks, hidden) + fp8(hidden, 2048 // ranks)
    dense = fp8(2 * 18432 // ranks, hidden) + fp8(hidden, 18432 // ranks)
    norms, router = 2 * hidden, 4 * 256 * (hidden + 1)
    shape, layout, target = v3_share(ranks)
    assert {name: part.num_bytes for name, part in target.parts.items()} == {
        "embedding": 2 * 129280 * hidden // ranks,
        "lm_head": 2 * 129280 * hidden // ranks,
        "attention": 61 * attention,
        "dense MLP": 3 * dense,
        "shared experts": 58 * expert,
        "routed experts": 58 * 256 * expert,
        "norms and router": 61 * 2 * norms + norms + 58 * router,
    }
    module = mtp_share(shape, layout, target)
    projection = 2 * 2 * hidden * hidden  # bf16, on every rank
    assert module.weight_bytes == attention + 257 * expert + projection + 5 * norms + router


def test_experts_that_are_whole_on_a_rank_stay_fp8_where_a_share_of_each_would_not():
    shape, _, one = v3_share(1)
    whole = target_share(shape, Layout(32, expert_parallel=True, keeps_fp8=True))
    routed = whole.parts["routed experts"]
    assert routed.num_elements == one.parts["routed experts"].num_elements / 32
    assert routed.num_bytes < 1.01 * routed.num_elements < routed.expanded_bytes
    assert whole.num_parameters == one.num_parameters
    shared_out = target_share(shape, Layout(32, keeps_fp8=True))  # 64 rows of each expert: half a block
    assert shared_out.parts["routed experts"].num_bytes > routed.num_bytes


def test_fp8_is_expanded_where_the_device_has_none():
    _, _, target = v3_share(16, keeps_fp8=False)
    assert target.parts["routed experts"].num_bytes == 2 * 58 * 256 * 3 * 2048 * 7168 // 16
    assert not target.keeps_fp8
    assert target.expanded_bytes == target.weight_bytes == v3_share(16)[2].expanded_bytes
    assert not DEVICES["a100"].reads_fp8
    assert DEVICES["h100"].reads_fp8


def test_a_share_that_cuts_a_block_of_scales_is_expanded():
    """18432 / 32 = 576 rows of the dense MLP begin in the middle of 128; so do 2048 / 32 = 64 of an expert."""
    _, _, target = v3_share(32)
    assert target.parts["dense MLP"].num_bytes == 2 * 3 * 3 * 18432 * 7168 // 32
    assert target.parts["routed experts"].num_bytes == 2 * 58 * 256 * 3 * 2048 * 7168 // 32
    assert target.parts["attention"].num_bytes < target.parts["attention"].expanded_bytes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_kv_are_those_that_are_loaded(architecture, tiny_checkpoint):
    folder = tiny_checkpoint(architecture)
    share = target_share(read_checkpoint_shape(str(folder), "auto"), Layout())
    model = load_model(folder, None, CPU, progress=False)
    assert share.weight_bytes == weight_bytes(model)
    assert share.kv_specs == model.kv_specs()
    assert len(share.windows) == len(share.kv_specs)


@pytest.mark.parametrize("architecture", ["llama_bias", "deepseek_v3"])
def test_the_share_of_one_rank_of_two_is_what_it_loads(architecture, tiny_checkpoint):
    folder = tiny_checkpoint(architecture)
    share = target_share(read_checkpoint_shape(str(folder), "float32"), Layout(num_ranks=2))
    assert tp_size() == 1  # as it was
    set_tensor_parallel_group(TensorParallelGroup(rank=1, size=2))
    try:
        model = load_model(folder, None, CPU, progress=False)
    finally:
        set_tensor_parallel_group(TensorParallelGroup())
    assert share.weight_bytes == weight_bytes(model)
    assert share.kv_specs == model.kv_specs()


def test_mtp_modules_are_those_that_are_loaded(tiny_checkpoint):
    folder = tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=2)
    shape = read_checkpoint_shape(str(folder), "auto")
    module = mtp_share(shape, Layout(), target_share(shape, Layout()))
    loaded = load_mtp(folder, load_model(folder, None, CPU, progress=False), torch.float32, CPU, progress=False)
    assert 2 * module.weight_bytes == weight_bytes(loaded)
    assert 2 * module.kv_specs == loaded.kv_specs()


def test_the_pool_is_the_engines(tiny_checkpoint, tmp_path, capsys):
    folder = tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=1)
    args = {
        "model": str(folder),
        "max_model_len": 128,
        "kv_cache_memory": 300_000,
        "device": "cpu",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    }
    result = plan_json(capsys, write_serve_file(tmp_path, **args))
    engine = LLMEngine(**args, progress=False)
    memory = result["rank_memory"]
    assert memory["pool_tokens"] == engine.block_manager.num_blocks * engine.config.block_size
    assert memory["token_bytes"] == 3 * 4 * (32 + 8)  # two layers and the module's, in fp32
    assert memory["pool_bytes"] <= 300_000 < memory["pool_bytes"] + 16 * memory["token_bytes"]
    engine.shutdown()


# --- which experts a pass touches


def choices(num_rows: int, num_experts: int, num_per_token: int, num_trials: int) -> np.ndarray:
    """Whether each expert has a row, in trials [num_trials, num_experts], by drawing them."""
    scores = np.random.default_rng(0).random((num_trials, num_rows, num_experts))
    chosen = np.argpartition(scores, num_per_token, axis=-1)[..., :num_per_token]
    touched = np.zeros((num_trials, num_experts), dtype=bool)
    for trial in range(num_trials):
        touched[trial, chosen[trial].ravel()] = True
    return touched


@pytest.mark.parametrize("num_rows", [1, 4, 32])
def test_distinct_experts_are_those_of_random_choices(num_rows):
    touched = choices(num_rows, 64, 4, num_trials=400)
    shared, whole = ExpertLoad(64, 4, num_ranks=1), ExpertLoad(64, 4, num_ranks=8)
    assert shared.expected(num_rows) == pytest.approx(touched.sum(1).mean(), rel=0.03)
    assert shared.share_read(num_rows) == pytest.approx(touched.mean(), rel=0.03)
    busiest = touched.reshape(400, 8, 8).sum(2).max(1).mean() / 8
    assert whole.share_read(num_rows) == pytest.approx(busiest, rel=0.06)
    assert whole.share_read(num_rows) > shared.share_read(num_rows)


def test_one_row_touches_its_own_experts_and_many_touch_all():
    load = ExpertLoad(256, 8, num_ranks=1)
    assert load.expected(1) == pytest.approx(8)
    assert load.expected(10_000) == pytest.approx(256)
    assert ExpertLoad(256, 8, num_ranks=16).share_read(10_000) == pytest.approx(1)


# --- what a pass and a step cost


def test_a_dense_pass_reads_layers_head_and_kv(llama):
    share = target_share(read_checkpoint_shape(str(llama), "auto"), Layout())
    assert share.num_parameters == 32 * LLAMA_LAYER + 2 * LLAMA_HEAD + 4096
    cost = pass_cost(share, ROUND, num_sequences=8, num_rows=32, num_logits=32, context_len=1000)
    assert cost.weight_bytes == 2 * (32 * LLAMA_LAYER + 4096 + LLAMA_HEAD)  # of the embedding, rows only
    assert cost.kv_bytes == 8 * 1000 * 32 * 2 * 8 * 128 * 2
    assert cost.memory_s == pytest.approx((cost.weight_bytes + cost.kv_bytes) / 1e9)
    matrices = 2 * 32 * (32 * LLAMA_LAYER + 4096 + LLAMA_HEAD)
    attention = 32 * 32 * 1000 * 32 * 4 * 128  # rows, layers, context, heads, two products of 128 each
    assert cost.arithmetic_s == pytest.approx((matrices + attention) / 1e12, rel=1e-9)
    assert cost.seconds == cost.memory_s
    without_logits = pass_cost(share, ROUND, 8, 32, num_logits=0, context_len=1000)
    assert cost.weight_bytes - without_logits.weight_bytes == 2 * LLAMA_HEAD


def test_arithmetic_and_overhead_count_where_they_are_more(llama):
    share = target_share(read_checkpoint_shape(str(llama), "auto"), Layout())
    slow = Device("slow", GIB, bandwidth=1e12, flops=1e9, layer_overhead_s=0.5)
    cost = pass_cost(share, slow, 1, 1, 1, context_len=1)
    assert cost.arithmetic_s > cost.memory_s
    assert cost.seconds == cost.arithmetic_s + 32 * 0.5


def test_a_window_bounds_what_a_layer_reads(tmp_path):
    values = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 100}
    folder = write_config(tmp_path / "qwen", values | {"max_window_layers": 20})
    share = target_share(read_checkpoint_shape(str(folder), "auto"), Layout())
    cost = pass_cost(share, ROUND, 1, 1, 1, context_len=1000)
    assert cost.kv_bytes == (20 * 1000 + 12 * 100) * 2 * 8 * 128 * 2


def test_a_tied_embedding_is_held_once_and_read_as_the_head(tmp_path):
    folder = write_config(tmp_path / "tied", LLAMA | {"tie_word_embeddings": True})
    share = target_share(read_checkpoint_shape(str(folder), "auto"), Layout())
    assert share.weight_bytes == 2 * (32 * LLAMA_LAYER + LLAMA_HEAD + 4096)
    assert pass_cost(share, ROUND, 1, 1, 1, 1).weight_bytes == share.weight_bytes


def test_experts_are_read_as_far_as_rows_touch_them():
    _, _, target = v3_share(16)
    one, many = (pass_cost(target, ROUND, n, n, n, context_len=1).weight_bytes for n in (1, 4096))
    rest = target.body.num_bytes + target.head.num_bytes
    assert one == pytest.approx(rest + target.routed.num_bytes * 8 / 256)
    assert many == pytest.approx(rest + target.routed.num_bytes)


def test_mtp_runs_over_kept_rows_and_then_over_one_a_draft():
    shape, layout, target = v3_share(8)
    drafter = PlannedDrafter("MTP", mtp_share(shape, layout, target), sees_hidden_states=True)
    h200 = DEVICES["h200"]
    passes = drafter.passes(h200, 4, [0.8, 0.5, 0.2], context_len=100)
    share = drafter.share
    rows = [4 * 2.5, 4, 4]
    assert passes == [pass_cost(share, h200, 4, num_rows, 4, 100) for num_rows in rows]
    assert drafter.passes(h200, 4, [], context_len=100) == []


def test_a_draft_model_lacks_its_last_draft_where_all_were_kept(llama):
    share = target_share(read_checkpoint_shape(str(llama), "auto"), Layout())
    passes = PlannedDrafter("draft model", share).passes(ROUND, 2, [0.9, 0.5], context_len=100)
    assert passes == [pass_cost(share, ROUND, 2, 2 * 1.5, 2, 100), pass_cost(share, ROUND, 2, 2, 2, 100)]


def test_predictions_are_tokens_over_time(llama):
    share = target_share(read_checkpoint_shape(str(llama), "auto"), Layout())
    lookup = PlannedDrafter("lookup")
    predictions = predict(share, lookup, DEVICES["h100"], [0.9, 0.5], context_len=1000)
    assert [each.num_drafts for each in predictions] == [0, 1, 2]
    assert [each.tokens_a_step for each in predictions] == pytest.approx([1, 1.9, 2.4])
    assert predictions[0].speedups == (1, 1, 1)
    # Bound by memory, free drafts multiply the speed by the tokens they bring; by arithmetic they do not.
    assert predictions[2].speedups[0] == pytest.approx(2.4, rel=1e-3)
    slow = Device("slow", GIB, bandwidth=1e15, flops=1e12)
    assert predict(share, lookup, slow, [0.9, 0.5], 1000)[2].speedups[0] == pytest.approx(2.4 / 3)

    drafting = PlannedDrafter("draft model", share)  # the target drafts for itself: k + 1 passes
    speedups = predict(share, drafting, DEVICES["h100"], [1.0, 1.0], 1000)[2].speedups
    assert speedups[0] == pytest.approx(1, rel=1e-3)


def test_predictions_are_near_published_figures():
    """TensorRT-LLM on R1, one sequence: mean lengths 1.92 to 3.01 gave 1.78 to 2.15 times the speed."""
    shape, layout, target = v3_share(8)
    drafter = PlannedDrafter("MTP", mtp_share(shape, layout, target), sees_hidden_states=True)
    device = replace(DEVICES["h200"], layer_overhead_s=150e-6)
    predictions = predict(target, drafter, device, [0.92, 0.66, 0.24, 0.17, 0.02], context_len=2048)
    assert [each.tokens_a_step for each in predictions[1:]] == pytest.approx([1.92, 2.58, 2.82, 2.99, 3.01])
    speedups = [each.speedups[0] for each in predictions[1:]]
    assert speedups == pytest.approx([1.78, 2.25, 2.28, 2.21, 2.15], rel=0.06)
    said = re.search(
        r"the plan predicts ([\d., ]+) for k = 1 to 5", (REPOSITORY / "docs" / "deepseek_mtp.md").read_text()
    )
    assert said is not None
    assert said[1] == ", ".join(f"{speedup:.2f}" for speedup in speedups)


def test_more_drafts_touch_more_experts():
    _, _, target = v3_share(8)
    floors = [step_floor(target, None, DEVICES["h200"], 1, [1.0] * k, 100) for k in range(4)]
    assert [floor.num_rows for floor in floors] == [1, 2, 3, 4]
    touched = [floor.experts_touched for floor in floors]
    assert touched[0] == pytest.approx(8)
    assert touched == sorted(touched)
    assert floors[3].seconds > 1.5 * floors[0].seconds


# --- the command


def test_the_small_file_with_its_three_lines_changed_fits_as_it_says(tmp_path, capsys):
    """The lines marked (1), (2) and (3), and nothing else, make it DeepSeek-V3 on eight H200."""
    text = (REPOSITORY / "serve_configs" / "deepseek_mtp.yaml").read_text()
    for number, value in ((1, DEEPSEEK_V3), (2, 8), (3, 32768)):
        text, num_changed = re.subn(rf"^( +\w+): \S+ # \({number}\) .*$", rf"\1: {value}", text, flags=re.MULTILINE)
        assert num_changed == 1
    path = tmp_path / "changed.yaml"
    path.write_text(text)
    assert "--device h200" in text
    result = plan_json(capsys, path, "--device", "h200")
    assert result["num_ranks"] == 8
    assert result["max_model_len"] == 32768
    assert result["rank_memory"]["pool_tokens"] >= 8 * 32768  # max_num_seqs full contexts


@pytest.mark.parametrize("name", BIG_FILES)
def test_the_figures_in_the_large_files_are_the_plans(name, tmp_path, capsys):
    path = REPOSITORY / "serve_configs" / f"{name}.yaml"
    result = plan_json(capsys, path, "--model-config", DEEPSEEK_V3)
    assert result["num_ranks"] == BIG_FILES[name]
    assert result["num_speculative_tokens"] == 3
    comments = " ".join(line.partition("#")[2].strip() for line in path.read_text().splitlines())
    memory, max_model_len = result["rank_memory"], result["max_model_len"]
    assert memory["token_bytes"] == 62 * 1152
    assert f"{memory['pool_tokens']} tokens" in comments
    assert f"{memory['token_bytes']} bytes" in comments
    for field in ("weight_bytes", "pool_bytes", "activation_bytes"):
        assert f"{memory[field] / GIB:.1f} GiB" in comments
    assert f"{memory['pool_tokens'] // max_model_len} requests of full length" in comments
    fair = memory["pool_tokens"] // 64 // 100 * 100
    assert f"{fair} tokens each" in comments
    args = yaml.safe_load(path.read_text())["applications"][0]["args"]
    whole = write_serve_file(tmp_path, **args | {"model": str(DEEPSEEK_V3), "expert_parallel": True})
    longer = plan_json(capsys, whole)["steps"][0]["seconds"] / result["steps"][0]["seconds"]
    assert f"{longer:.1f} times as long at batch 1" in comments


@pytest.mark.parametrize("name", BIG_FILES)
def test_half_the_ranks_of_the_large_files_are_too_few(name, tmp_path, capsys):
    content, num_ranks = (REPOSITORY / "serve_configs" / f"{name}.yaml").read_text(), BIG_FILES[name]
    path, half = tmp_path / "half.yaml", num_ranks // 2
    path.write_text(content.replace(f"tensor_parallel_size: {num_ranks}", f"tensor_parallel_size: {half}"))
    assert plan.main([str(path), "--model-config", str(DEEPSEEK_V3)]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: tensor_parallel_size is {half}: weights take ")


def test_the_text_says_what_the_json_says(llama, tmp_path, capsys):
    path = write_serve_file(
        tmp_path, model=str(llama), max_num_seqs=8, speculative_config={"method": "ngram", "num_speculative_tokens": 3}
    )
    result = plan_json(capsys, path, "--device", "l4")
    assert plan.main([str(path), "--device", "l4", "--acceptance", "0.7,0.5,0.3", "--layer-overhead", "20"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[:3] == [
        f"{llama}, 8.03B parameters",
        "1 rank of l4: 22.0 GiB, 0.3 TB/s, 121 TFLOP/s",
        "method ngram, k = 3",
    ]
    for name, num_bytes in result["rank_weight_bytes"].items():
        assert re.search(rf"^{name} +{size(num_bytes)}$", text, re.MULTILINE)
    memory = result["rank_memory"]
    assert memory["token_bytes"] == 131072
    assert f"KV: 131072 bytes a token; the pool holds {memory['pool_tokens']} tokens" in text
    assert "Longest request: 8192 tokens as configured, 8192 at most." in lines
    assert "max_num_seqs is 8: steps of 64 do not occur." in lines
    assert "20 µs a layer added." in lines
    header = next(i for i, line in enumerate(lines) if line.startswith("sequences"))
    assert [line.split()[0] for line in lines[header + 2 : header + 8]] == ["1", "k", "8", "k", "64", "k"]
    assert len({len(line) for line in lines[header : header + 2]}) == 1
    assert re.search(r"^3 +2\.50 +2\.\d\d <", text, re.MULTILINE)


def test_the_device_is_the_files_unless_another_is_named(llama, tmp_path, capsys):
    actor = {"deployment_config": {"ray_actor_options": {"accelerator_type": "A100-80G"}}}
    path = write_serve_file(tmp_path, model=str(llama), device="cuda", **actor)
    assert plan_json(capsys, path)["device"]["name"] == "a100"
    changed = plan_json(capsys, path, "--device", "l40s", "--memory", "40", "--bandwidth", "500")["device"]
    assert changed["name"] == "l40s"
    assert (changed["memory_bytes"], changed["bandwidth"]) == (40 * GIB, 5e11)
    assert choose_device(None, None, "auto").name == "cpu"
    for accelerator, configured, reason in (("V100", "cuda", "accelerator_type is V100"), (None, "cuda", "device is")):
        with pytest.raises(ValueError, match=f"^{reason}.*--device, one of b200, h200"):
            choose_device(None, accelerator, configured)


def test_a_draft_model_is_planned_beside_its_target(llama, tmp_path, capsys):
    small = write_config(tmp_path / "small", LLAMA | {"num_hidden_layers": 2, "torch_dtype": "float32"})
    speculative = {"method": "draft_model", "num_speculative_tokens": 2, "model": "some/draft"}
    path = write_serve_file(tmp_path, model="some/model", max_num_seqs=2, speculative_config=speculative)
    configs = ("--model-config", llama, "--draft-config", small / "config.json")
    result = plan_json(capsys, path, "--device", "a100", *configs)
    assert result["model"] == "some/model"
    assert result["rank_weight_bytes"]["draft model"] == 2 * (2 * LLAMA_LAYER + 2 * LLAMA_HEAD + 4096)  # target's bf16
    assert result["rank_memory"]["token_bytes"] == 34 * 2 * 8 * 128 * 2
    assert result["steps"][1]["draft_s"] > 0


@pytest.mark.parametrize(
    ("placed", "num_ranks_of_drafter", "num_processes"),
    [({}, 1, 1), ({"draft_tensor_parallel_size": 2}, 2, 1), ({"placement": "actor"}, 1, 2)],
)
def test_a_draft_model_is_whole_on_rank_0_unless_ranks_share_it(
    placed, num_ranks_of_drafter, num_processes, llama, tmp_path, capsys
):
    small = write_config(tmp_path / "small", LLAMA | {"num_hidden_layers": 2})
    speculative = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(small), **placed}
    path = write_serve_file(tmp_path, model=str(llama), tensor_parallel_size=2, speculative_config=speculative)
    result = plan_json(capsys, path, "--device", "a100")
    norms = 5 * 4096
    matrices = 2 * LLAMA_LAYER + 2 * LLAMA_HEAD + 4096 - norms
    assert result["rank_weight_bytes"]["draft model"] == 2 * (matrices // num_ranks_of_drafter + norms)
    assert result["rank_memory"]["runtime_bytes"] == num_processes * DEVICES["a100"].runtime_bytes
    assert plan.main([str(path), "--device", "a100"]) == 0
    text = capsys.readouterr().out
    assert ("whole, on rank 0" in text) == (num_ranks_of_drafter == 1)
    assert ("by a draft actor beside rank 0" in text) == (num_processes == 2)


def test_without_a_dtype_bfloat16_is_assumed_and_said(tmp_path, capsys):
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    path = write_serve_file(tmp_path, model=str(write_config(tmp_path / "model", config)))
    assert plan.main([str(path), "--device", "h100"]) == 0
    assert "bfloat16 is assumed" in capsys.readouterr().out


def test_a_lookup_by_an_actor_takes_nothing_of_a_gpu(llama, tmp_path, capsys):
    path = write_serve_file(tmp_path, model=str(llama), speculative_config={"method": "ngram", "placement": "actor"})
    for device, num_processes in (("a100", 1), ("cpu", 2)):
        runtime = plan_json(capsys, path, "--device", device, "--memory", "40")["rank_memory"]["runtime_bytes"]
        assert runtime == num_processes * DEVICES[device].runtime_bytes


V3 = {"model": str(DEEPSEEK_V3), "device": "cuda"}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "weights": (
        V3 | {"tensor_parallel_size": 8},
        ("--device", "h100"),
        "tensor_parallel_size is 8: weights take 79.6 GiB and",
    ),
    "context": (
        V3 | {"tensor_parallel_size": 16, "max_model_len": 163840, "kv_cache_memory": 10**9},
        ("--device", "h100"),
        "max_model_len is 163840, which needs 10980 MiB of KV",
    ),
    "positions": (
        V3 | {"max_model_len": 163841},
        ("--device", "h100"),
        "max_model_len is 163841, and the checkpoint's",
    ),
    "heads": (
        V3 | {"tensor_parallel_size": 3},
        ("--device", "h200"),
        "vocab_size is 129280, which tensor_parallel_size 3 does not divide",
    ),
    "experts": (
        V3 | {"tensor_parallel_size": 5, "expert_parallel": True},
        ("--device", "h200"),
        "n_routed_experts is 256, which tensor_parallel_size 5 does not divide",
    ),
    "no_experts": (
        {"tensor_parallel_size": 2, "expert_parallel": True},
        (),
        "expert_parallel is True, and LlamaForCausalLM has no experts",
    ),
    "width": (
        {"tensor_parallel_size": 3},
        (),
        "args.tensor_parallel_size is 3, which does not divide the checkpoint's num_attention_heads, 32: use a divisor",
    ),
    "no_mtp": (
        MTP,
        (),
        "speculative_config.method is mtp, and config.json describes no MTP module (architectures Llama",
    ),
    "device": ({}, ("--device", "abacus"), "--device is abacus: choose from b200, h200"),
    "shares": (
        MTP | V3,
        ("--device", "h200", "--acceptance", "0.9,1.2,0.1"),
        "--acceptance is 0.9,1.2,0.1: give shares",
    ),
    "rising": (
        MTP | V3,
        ("--device", "h200", "--acceptance", "0.5,0.6,0.1"),
        "--acceptance is 0.5,0.6,0.1: a draft is",
    ),
    "few_shares": (
        MTP | V3 | {"tensor_parallel_size": 8},
        ("--device", "h200", "--acceptance", "0.9"),
        "--acceptance has 1",
    ),
    "no_drafts": ({}, ("--acceptance", "0.9"), "--acceptance is given, and the file has no speculative_config"),
    "long_context": ({}, ("--context", "9000"), "--context is 9000, above max_model_len, 8192"),
    "field": ({"max_seqs": 1}, (), "args.max_seqs is 1: unknown field; did you mean max_num_seqs?"),
    "hub": (
        {"model": "nobody/nothing"},
        (),
        "model nobody/nothing is no folder here, and the hub does not give its config",
    ),
    "draft_config": (
        {},
        ("--draft-config", str(DEEPSEEK_V3)),
        "--draft-config is given, and speculative_config.method is",
    ),
    "no_config": (
        {},
        ("--model-config", "/nowhere.json"),
        "/nowhere.json is no config.json, nor a folder that holds one",
    ),
}


@pytest.mark.parametrize(("args", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(args, options, reason, llama, tmp_path, capsys):
    path = write_serve_file(tmp_path, **{"model": str(llama), **args})
    assert plan.main([str(path), *options]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"{path}: {reason}")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("applications: [", "not YAML: "),
        ("[]", "not a Serve file with one entry under `applications`"),
        ("applications: [{}, {}]", "not a Serve file with one entry under `applications`"),
        ("applications: [{import_path: x}]", "applications[0].args: missing"),
    ],
)
def test_a_file_that_is_no_serve_file_is_refused(content, reason, tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    assert plan.main([str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: {reason}")
    assert plan.main([str(tmp_path / "absent.yaml")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_every_proposer_can_be_planned():
    assert DRAFTERS.keys() == PROPOSERS.keys()


def test_sizes_and_durations_have_three_digits():
    assert [size(n) for n in (12, 2048, 5 * 2**20, 1.5 * GIB, 139 * GIB)] == [
        "12 B",
        "2.00 KiB",
        "5.00 MiB",
        "1.50 GiB",
        "139 GiB",
    ]
    assert [duration(s) for s in (2.5, 0.0123, 0.000345, 1e-6)] == ["2.50 s", "12.3 ms", "345 µs", "1.00 µs"]


def test_table_columns_line_up():
    assert table(["a", "figure"], [["first", "1"], ["x", "123"]]).splitlines() == [
        "a      figure",
        "-----  ------",
        "first       1",
        "x         123",
    ]
