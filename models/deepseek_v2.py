"""DeepSeek-V2 and V2-Lite: V3 with experts chosen by their softmax scores."""

from models.config_fields import ConfigFields
from models.deepseek_v3 import read_deepseek_config
from models.model_config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    fields.require("mlp_bias", False, default=False)
    fields.require("norm_topk_prob", False, default=False)
    return read_deepseek_config(fields, topk_methods=("greedy", "group_limited_greedy"), interleaved=True)
