"""Llama 2 and 3, SmolLM2 and others of their shape: the common decoder."""

from models.config_fields import ConfigFields
from models.decoder_config import read_decoder_config
from models.model_config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    fields.require("mlp_bias", False, default=False)
    fields.require("rope_interleaved", False, default=False)
    bias = fields.boolean("attention_bias", default=False)
    return read_decoder_config(fields, qkv_bias=bias, o_bias=bias)
