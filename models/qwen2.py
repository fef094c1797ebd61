"""Qwen2 and Qwen2.5: the common decoder with biases on queries, keys and values."""

from models.config_fields import ConfigFields
from models.decoder_config import read_decoder_config, read_qwen_sliding_windows
from models.model_config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    windows = read_qwen_sliding_windows(fields)
    return read_decoder_config(fields, qkv_bias=True, sliding_windows=windows)
