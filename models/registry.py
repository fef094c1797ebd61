"""The targets, by the name under `architectures` in config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from models import deepseek_v2, deepseek_v3, llama, mistral, qwen2, qwen3
from models.causal_lm import BuildDecoderLayer
from models.config_fields import ConfigFields
from models.layers.decoder_layer import grouped_query_layer
from models.model_config import ModelConfig


@dataclass(frozen=True)
class Architecture:
    read_config: Callable[[ConfigFields], ModelConfig]
    decoder_layer: BuildDecoderLayer


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.read_config, grouped_query_layer),
    "MistralForCausalLM": Architecture(mistral.read_config, grouped_query_layer),
    "Qwen2ForCausalLM": Architecture(qwen2.read_config, grouped_query_layer),
    "Qwen3ForCausalLM": Architecture(qwen3.read_config, grouped_query_layer),
    "DeepseekV2ForCausalLM": Architecture(deepseek_v2.read_config, deepseek_v3.decoder_layer),
    "DeepseekV3ForCausalLM": Architecture(deepseek_v3.read_config, deepseek_v3.decoder_layer),
}
