"""Mistral: the common decoder; in the first version every layer has a sliding window."""

from models.config_fields import ConfigFields
from models.decoder_config import read_decoder_config
from models.model_config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    windows = (fields.nullable_integer("sliding_window"),) * fields.integer("num_hidden_layers")
    return read_decoder_config(fields, sliding_windows=windows)
