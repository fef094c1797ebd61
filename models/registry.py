"""The targets, by the name under `architectures` in config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from models import llama, mistral, qwen2, qwen3
from models.config_fields import ConfigFields
from models.layers.decoder_layer import DecoderLayer
from models.model_config import ModelConfig


@dataclass(frozen=True)
class Architecture:
    read_config: Callable[[ConfigFields], ModelConfig]
    decoder_layer: type[DecoderLayer]


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.read_config, DecoderLayer),
    "MistralForCausalLM": Architecture(mistral.read_config, DecoderLayer),
    "Qwen2ForCausalLM": Architecture(qwen2.read_config, DecoderLayer),
    "Qwen3ForCausalLM": Architecture(qwen3.read_config, DecoderLayer),
}
