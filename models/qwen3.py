"""Qwen3, dense: the common decoder with normed queries and keys."""

from models.config_fields import ConfigFields
from models.decoder_config import read_decoder_config, read_qwen_sliding_windows
from models.model_config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    bias = fields.boolean("attention_bias", default=False)
    return read_decoder_config(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_windows=read_qwen_sliding_windows(fields),
    )
