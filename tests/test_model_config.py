"""config.json is read strictly: what the code does not implement is refused by name."""

import json
from pathlib import Path

import pytest
import torch

from models.config import read_model_config
from models.model_config import LinearRopeScaling, Llama3RopeScaling, RopeConfig
from models.registry import ARCHITECTURES as KNOWN
from tests.helpers.tiny_models import ARCHITECTURES, make_tiny_checkpoint

LLAMA = {  # as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 2, "sliding_window": 4096}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEEPSEEK_V3 = {  # as published
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
REMOVED = object()


@pytest.fixture
def read(tmp_path):
    """`read(base, **changes)`: the configuration of a folder with such a config.json."""

    def read_changed(base: dict, generation: dict | None = None, **changes):
        values = {name: value for name, value in (base | changes).items() if value is not REMOVED}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(tmp_path)

    return read_changed


def test_a_transformers_4_file(read):
    config = read(LLAMA, rope_scaling=LLAMA3 | {"rope_type": "llama3"})
    assert config.head_dim == 128
    assert config.rope == RopeConfig(500000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (False, False, False)
    assert not config.tie_word_embeddings
    assert config.sliding_windows == (None,) * 4


def test_a_transformers_5_file_says_the_same(read):
    old = read(LLAMA, rope_scaling=LLAMA3 | {"type": "llama3"})
    parameters = LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}
    new = read(LLAMA, rope_theta=REMOVED, torch_dtype=REMOVED, dtype="bfloat16", rope_parameters=parameters)
    assert new == old


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_can_be_read(tmp_path, architecture):
    config = read_model_config(make_tiny_checkpoint(tmp_path, architecture, with_tokenizer=False))
    assert config.dtype == torch.float32
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2.5}, LinearRopeScaling(2.5)),
        ({"rope_type": "linear", "factor": 2, "original_max_position_embeddings": 4096}, LinearRopeScaling(2.0)),
    ],
)
def test_rope_scaling(read, scaling, expected):
    assert read(LLAMA, rope_scaling=scaling).rope == RopeConfig(500000.0, expected)


def test_defaults_of_old_files(read):
    config = read(LLAMA, num_key_value_heads=REMOVED, rope_theta=REMOVED, tie_word_embeddings=REMOVED)
    assert config.num_key_value_heads == 32
    assert config.rope.theta == 10000.0
    assert not config.tie_word_embeddings


def test_biases(read):
    assert read(LLAMA, attention_bias=True).qkv_bias
    assert read(LLAMA, attention_bias=True).o_bias
    qwen2 = read(QWEN2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(QWEN3)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)


def test_deepseek_v3_as_published(read):
    config = read(DEEPSEEK_V3)
    attention, moe = config.latent_attention, config.moe
    assert (attention.q_lora_rank, attention.cached_dim, attention.qk_head_dim) == (1536, 576, 192)
    assert attention.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert config.rope.interleaved
    assert config.rope.scaling.attention_factor == 1.0
    assert (config.head_dim, config.weight_block_size, config.num_nextn_predict_layers) == (64, (128, 128), 1)
    assert (moe.topk_method, moe.n_group, moe.topk_group, moe.norm_topk_prob) == ("noaux_tc", 8, 4, True)
    assert (moe.n_routed_experts, moe.num_experts_per_tok, moe.first_k_dense_replace) == (256, 8, 3)
    unscaled = read(DEEPSEEK_V3, rope_scaling=None, rope_interleave=False, num_nextn_predict_layers=REMOVED)
    assert unscaled.latent_attention.softmax_scale == pytest.approx(192**-0.5)
    assert not unscaled.rope.interleaved
    assert unscaled.num_nextn_predict_layers == 0


def test_deepseek_v2_lite(read):
    config = read(V2_LITE)
    assert config.latent_attention.q_lora_rank is None
    assert (config.moe.topk_method, config.moe.n_shared_experts, config.moe.norm_topk_prob) == ("greedy", 2, False)
    limited = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    assert read(V2_LITE, **limited).moe.topk_group == 3


def test_yarn_without_mscale(read):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    yarn = read(QWEN3, rope_scaling=scaling).rope.scaling
    assert (yarn.beta_fast, yarn.beta_slow, yarn.mscale, yarn.truncate) == (32.0, 1.0, None, True)
    assert yarn.attention_factor == pytest.approx(0.1 * 1.3862944 + 1)
    assert read(DEEPSEEK_V3, rope_scaling=scaling).latent_attention.softmax_scale == pytest.approx(192**-0.5)


def test_sliding_windows(read):
    full, window = [None] * 4, [4096] * 4
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert list(read(MISTRAL).sliding_windows) == window
    assert list(read(MISTRAL, sliding_window=None).sliding_windows) == full
    assert list(read(LLAMA, sliding_window=4096).sliding_windows) == full, "as transformers has it"
    for base in (QWEN2, QWEN3):
        assert list(read(base).sliding_windows) == full
        assert list(read(base, use_sliding_window=False, layer_types=types).sliding_windows) == full
        assert list(read(base, use_sliding_window=True).sliding_windows) == [None, None, 4096, 4096]
        alternating = read(base, use_sliding_window=True, layer_types=types).sliding_windows
        assert alternating == (4096, None, None, 4096)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, None, (7,)),
        (7, [9, 7], (7, 9)),
        ([7, 8], 9, (7, 8, 9)),
        (None, 0, (0,)),
        (REMOVED, None, ()),
    ],
)
def test_every_end_of_run_counts(read, in_config, in_generation, expected):
    generation = None if in_generation is None else {"eos_token_id": in_generation, "temperature": 0.6}
    assert read(LLAMA, generation, eos_token_id=in_config).eos_token_ids == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_dtype_it_is_that_of_the_weights(tmp_path, dtype):
    folder = make_tiny_checkpoint(tmp_path, with_tokenizer=False, dtype=dtype)
    values = json.loads((folder / "config.json").read_text())
    del values["dtype"]
    (folder / "config.json").write_text(json.dumps(values))
    assert read_model_config(folder).dtype == dtype


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            LLAMA,
            {"architectures": ["GPT2LMHeadModel"]},
            r'architectures is \["GPT2LMHeadModel"\]; implemented are Llama',
        ),
        (LLAMA, {"architectures": REMOVED}, r"architectures is missing"),
        (LLAMA, {"hidden_act": "gelu"}, r'hidden_act is "gelu"; only "silu" is implemented'),
        (LLAMA, {"hidden_act": REMOVED}, r"hidden_act is missing; only"),
        (LLAMA, {"mlp_bias": True}, r"mlp_bias is true; only false is implemented"),
        (LLAMA, {"rope_interleaved": True}, r"rope_interleaved is true"),
        (LLAMA, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5; only 1.0"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "awq"}},
            r'quantization_config: quant_method is "awq"; only "fp8"',
        ),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: weight_block_size is missing"),
        (LLAMA, {"hidden_size": REMOVED}, r"hidden_size is missing; a positive integer"),
        (LLAMA, {"hidden_size": "4096"}, r'hidden_size is "4096"; a positive integer'),
        (LLAMA, {"num_hidden_layers": True}, r"num_hidden_layers is true; a positive integer"),
        (LLAMA, {"vocab_size": 0}, r"vocab_size is 0; a positive integer"),
        (LLAMA, {"rms_norm_eps": "1e-5"}, r'rms_norm_eps is "1e-5"; a positive number'),
        (LLAMA, {"tie_word_embeddings": "yes"}, r'tie_word_embeddings is "yes"; true or false'),
        (LLAMA, {"num_key_value_heads": 5}, r"num_key_value_heads is 5; it must divide num_attention_heads, 32"),
        (LLAMA, {"num_attention_heads": 24}, r"num_attention_heads is 24; without head_dim"),
        (LLAMA, {"head_dim": 63}, r"head_dim is 63; .*even"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, r'torch_dtype is "float8_e4m3fn"; implemented are bfloat16'),
        (LLAMA, {"eos_token_id": "</s>"}, r'eos_token_id is "</s>"; a token id'),
        (LLAMA, {"eos_token_id": 128256}, r"eos_token_id 128256 is not below vocab_size, 128256"),
        (
            LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r'rope_scaling: type is "dynamic"; use a checkpoint with one of default, linear',
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "longrope"}},
            r'rope_type is "longrope"; use a checkpoint with one of .*llama3, yarn',
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling: factor is missing"),
        (
            LLAMA,
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "mscale": 1.0}},
            r"rope_scaling: mscale is 1.0; llama3",
        ),
        (
            LLAMA,
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}},
            r"high_freq_factor is 1.0",
        ),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"full_attention is .*no such field",
        ),
        (
            DEEPSEEK_V3,
            {"topk_method": "aux"},
            r'topk_method is "aux"; use a checkpoint with noaux_tc',
        ),
        (V2_LITE, {"topk_method": "noaux_tc"}, r'topk_method is "noaux_tc"; .*greedy or group_limited_greedy'),
        (
            DEEPSEEK_V3,
            {"scoring_func": "tanh"},
            r'scoring_func is "tanh"; use .* "sigmoid", which topk_method "noaux_tc" goes with',
        ),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, r'scoring_func is "softmax"; use .* "sigmoid"'),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "su", "factor": 4}}, r'rope_scaling: type is "su"; use a checkpoint'),
        (
            DEEPSEEK_V3,
            {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale_all_dim": None}},
            r"rope_scaling: mscale is 1.0; mscale and mscale_all_dim go together",
        ),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, r"moe_layer_freq is 2; only 1"),
        (DEEPSEEK_V3, {"n_group": 7}, r"n_group is 7; it must divide n_routed_experts, 256"),
        (DEEPSEEK_V3, {"n_group": 256}, r"n_group is 256; a group of noaux_tc needs two experts"),
        (DEEPSEEK_V3, {"topk_group": 9}, r"topk_group is 9; it must be at most n_group, 8"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 129}, r"num_experts_per_tok is 129; only 128 experts are in"),
        (DEEPSEEK_V3, {"q_lora_rank": REMOVED}, r"q_lora_rank is missing"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, r"qk_rope_head_dim is 63; .*even"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, r"first_k_dense_replace is -1; an integer of 0 or more"),
        (DEEPSEEK_V3, {"num_nextn_predict_layers": -1}, r"num_nextn_predict_layers is -1; an integer of 0 or more"),
        (DEEPSEEK_V3, {"tie_word_embeddings": True}, r"tie_word_embeddings is true; only false"),
        (V2_LITE, {"norm_topk_prob": True}, r"norm_topk_prob is true; only false"),
        (V2_LITE, {"mlp_bias": True}, r"mlp_bias is true; only false"),
        (MISTRAL, {"sliding_window": REMOVED}, r"sliding_window is missing"),
        (MISTRAL, {"sliding_window": -1}, r"sliding_window is -1; a positive integer"),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention"]}, r"layer_types is .*4 entries out of"),
        (
            QWEN3,
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            r"layer_types is .*4 entries out of",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(read, base, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(base, **changes)
    assert "config.json" in str(caught.value)


def test_an_unknown_architecture_is_answered_with_those_known(read):
    with pytest.raises(ValueError, match=", ".join(KNOWN)):
        read(LLAMA, architectures=["DeepseekV9ForCausalLM"])


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json: give the folder of a Hugging Face checkpoint"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[]", "holds list, not an object")])
def test_a_broken_configuration(tmp_path: Path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_model_config(tmp_path)
