"""Reading the part of config.json that Llama and its kin have in common."""

import torch

from models.config_fields import ConfigFields
from models.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeConfig, YarnRopeScaling

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROPE_FIELDS: dict[str, set[str]] = {  # rope_type: the fields it takes beside rope_theta
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},  # the second only informs
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_decoder_config(
    fields: ConfigFields,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    sliding_windows: tuple[int | None, ...] | None = None,  # None: every layer sees everything
) -> ModelConfig:
    """The configuration of a pre-norm decoder with grouped-query attention, RoPE and a gated SiLU MLP.

    Defaults are those of transformers. Raises ValueError for anything that is not implemented.
    """
    fields.require("hidden_act", "silu", default=None)
    num_hidden_layers = fields.integer("num_hidden_layers")
    hidden_size, num_attention_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_key_value_heads = fields.integer("num_key_value_heads", default=num_attention_heads)
    if num_attention_heads % num_key_value_heads:
        raise fields.error("num_key_value_heads", f"it must divide num_attention_heads, {num_attention_heads}")
    if "head_dim" not in fields and hidden_size % num_attention_heads:
        raise fields.error("num_attention_heads", f"without head_dim it must divide hidden_size, {hidden_size}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_attention_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} entries a head cannot be rotated in pairs: it must be even")
    bos_token_ids = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=fields.texts("architectures")[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows or (None,) * num_hidden_layers,
        dtype=read_dtype(fields),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
        weight_block_size=read_weight_block_size(fields),
    )


def read_weight_block_size(fields: ConfigFields) -> tuple[int, int]:
    """Of `quantization_config`; only FP8 by blocks is known. Which weights are FP8 the checkpoint's tensors say."""
    if "quantization_config" not in fields:
        return (128, 128)
    section = fields.section("quantization_config")
    section.require("quant_method", "fp8", default=None)
    section.require("fmt", "e4m3", default="e4m3")
    section.require("activation_scheme", "dynamic", default="dynamic")
    block_size = section.integers("weight_block_size")
    if len(block_size) != 2:
        raise section.error("weight_block_size", "two sizes are needed: rows and columns")
    return (block_size[0], block_size[1])


def read_rope(fields: ConfigFields) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    fields.require("partial_rotary_factor", 1.0, default=1.0)
    section = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    section.require("partial_rotary_factor", 1.0, default=1.0)
    theta = (section if "rope_theta" in section else fields).number("rope_theta", default=10000.0)
    type_field = "type" if "type" in section and "rope_type" not in section else "rope_type"
    rope_type = section.text(type_field) if type_field in section else "default"
    if rope_type not in ROPE_FIELDS:
        known = ", ".join(ROPE_FIELDS)
        raise section.error(type_field, f"use a checkpoint with one of {known}: no other is implemented")
    unknown = section.names() - ROPE_FIELDS[rope_type] - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if unknown:
        raise section.error(min(unknown), f"{rope_type} scaling has no such field; remove it")
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, LinearRopeScaling(section.number("factor")))
    if rope_type == "yarn":
        return RopeConfig(theta, _read_yarn(section))
    scaling = Llama3RopeScaling(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=section.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise section.error("high_freq_factor", f"it must be above low_freq_factor, {scaling.low_freq_factor}")
    return RopeConfig(theta, scaling)


def _read_yarn(section: ConfigFields) -> YarnRopeScaling:
    if ("mscale" in section) != ("mscale_all_dim" in section):
        raise section.error("mscale", "mscale and mscale_all_dim go together: give both or neither")
    has_mscale = "mscale" in section
    return YarnRopeScaling(
        factor=section.number("factor"),
        original_max_position_embeddings=section.integer("original_max_position_embeddings"),
        beta_fast=section.number("beta_fast", default=32.0),
        beta_slow=section.number("beta_slow", default=1.0),
        mscale=section.number("mscale") if has_mscale else None,
        mscale_all_dim=section.number("mscale_all_dim") if has_mscale else None,
        truncate=section.boolean("truncate", default=True),
    )


def read_qwen_sliding_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """One a layer: `layer_types` where given, else the layers from `max_window_layers` on."""
    num_hidden_layers = fields.integer("num_hidden_layers")
    if not fields.boolean("use_sliding_window", default=False):
        return (None,) * num_hidden_layers
    window = fields.integer("sliding_window", default=4096)
    if "layer_types" not in fields:
        first = fields.integer("max_window_layers", default=28)
        return tuple(window if i >= first else None for i in range(num_hidden_layers))
    windows = {"full_attention": None, "sliding_attention": window}
    layer_types = fields.texts("layer_types")
    if len(layer_types) != num_hidden_layers or not set(layer_types) <= set(windows):
        raise fields.error("layer_types", f"{num_hidden_layers} entries out of {', '.join(windows)} are needed")
    return tuple(windows[layer_type] for layer_type in layer_types)


def read_dtype(fields: ConfigFields) -> torch.dtype:
    """`dtype` (transformers 5) or `torch_dtype` (transformers 4)."""
    name = "torch_dtype" if "torch_dtype" in fields and "dtype" not in fields else "dtype"
    if fields.text(name) not in DTYPES:
        raise fields.error(name, f"implemented are {', '.join(DTYPES)}")
    return DTYPES[fields.text(name)]
