"""What a GGUF file says, in Hugging Face's names, layouts and words."""

import re
from pathlib import Path

import gguf
import numpy as np
import torch

from models.config_fields import ConfigFields, JsonObject
from models.layers.rotary import inverse_frequencies
from models.model_config import Llama3RopeScaling, RopeConfig

ARCHITECTURES = {  # general.architecture: `architectures` and `model_type` of config.json
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral's files call themselves so too
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
MODULE_NAMES = {  # GGUF's: the checkpoint's
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULE_NAMES = {  # within blk.{i}: within model.layers.{i}
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as a divisor of each pair's frequency
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")  # end a message where the chat template uses them


class GGUFCheckpoint:
    """A GGUF file of a known architecture. Raises ValueError for one that cannot be represented."""

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is not a whole GGUF file: {error}") from error
        self.path = path
        self.fields = ConfigFields({name: field.contents() for name, field in reader.fields.items()}, str(path))
        self.architecture = self.fields.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise self.fields.error("general.architecture", f"implemented are {', '.join(ARCHITECTURES)}")
        self.fields.require("split.count", 1, default=1)
        for name in ("expert_count", "attention.sliding_window"):
            self.fields.require(self._key(name), 0, default=0)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        self._rope_factors = stored.pop(ROPE_FACTORS, None)
        self._stored = {self._checkpoint_name(name): tensor for name, tensor in stored.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By the checkpoint's names; GGUF lists dimensions innermost first."""
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fp32, dequantised, in Hugging Face's layout."""
        stored = self._stored[name]
        try:
            weights = gguf.quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {stored.name} is stored as {stored.tensor_type.name}: {error}") from error
        if self.architecture == "llama" and re.search(r"\.(q|k)_proj\.", name):
            weights = _unpermute(weights, self._num_heads if ".q_proj." in name else self._num_kv_heads)
        # A copy where dequantisation had nothing to do: the file's pages are read-only.
        return torch.from_numpy(np.array(weights, dtype=np.float32, copy=not weights.flags.writeable))

    def config(self, dtype: torch.dtype) -> JsonObject:
        """config.json."""
        name, model_type = ARCHITECTURES[self.architecture]
        return {
            "architectures": [name],
            "model_type": model_type,
            "dtype": str(dtype).removeprefix("torch."),
            "hidden_size": self._integer("embedding_length"),
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": self._num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": self._head_dim,
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self.fields.number(self._key("attention.layer_norm_rms_epsilon")),
            "hidden_act": "silu",
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._stored,
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": "lm_head.weight" not in self._stored,
            **self._special_token_ids(),
            "eos_token_id": self._eos_token_ids()[0],
        }

    def generation_config(self) -> JsonObject:
        """generation_config.json: every id that ends an answer."""
        eos_token_ids = self._eos_token_ids()
        return {
            **self._special_token_ids(),
            "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids,
        }

    @property
    def _num_heads(self) -> int:
        return self._integer("attention.head_count")

    @property
    def _num_kv_heads(self) -> int:
        return self.fields.integer(self._key("attention.head_count_kv"), default=self._num_heads)

    @property
    def _head_dim(self) -> int:
        default = self._integer("embedding_length") // self._num_heads
        head_dim = self.fields.integer(self._key("attention.key_length"), default=default)
        self.fields.require(self._key("rope.dimension_count"), head_dim, default=head_dim)
        return head_dim

    def _rope_parameters(self) -> JsonObject:
        theta = self.fields.number(self._key("rope.freq_base"), default=10000.0)
        key = self._key("rope.scaling.type")
        scaling_type = self.fields.text(key) if key in self.fields else "none"
        if scaling_type == "linear":
            factor = self.fields.number(self._key("rope.scaling.factor"))
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if scaling_type != "none":
            raise self.fields.error(key, "implemented are none, linear")
        if self._rope_factors is None:
            return {"rope_type": "default", "rope_theta": theta}
        factors = torch.from_numpy(np.array(self._rope_factors.data, dtype=np.float32))
        return {"rope_type": "llama3", "rope_theta": theta, **vars(self._llama3_scaling(theta, factors))}

    def _llama3_scaling(
        self,
        theta: float,
        factors: torch.Tensor,  # [head_dim / 2]: by which each pair's frequency is divided
    ) -> Llama3RopeScaling:
        """The file keeps only the outcome; all Llama 3 checkpoints differ in the factor alone."""
        scaling = Llama3RopeScaling(factors.max().item(), 1.0, 4.0, 8192)
        expected = inverse_frequencies(self._head_dim, RopeConfig(theta, scaling))
        if not torch.allclose(inverse_frequencies(self._head_dim, RopeConfig(theta)) / factors, expected, rtol=1e-3):
            raise ValueError(f"{self.path}: {ROPE_FACTORS} is not Llama 3's scaling: use the Hugging Face checkpoint")
        return scaling

    def _special_token_ids(self) -> dict[str, int]:
        keys = {"bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id"}
        return {name: self.fields.token_ids(key)[0] for name, key in keys.items() if key in self.fields}

    def _eos_token_ids(self) -> list[int]:
        """The declared ends, and the end of a message where chats use another."""
        ids = [
            *self.fields.token_ids("tokenizer.ggml.eos_token_id"),
            *self.fields.token_ids("tokenizer.ggml.eot_token_id"),
        ]
        if "tokenizer.chat_template" in self.fields:
            template, tokens = self.fields.text("tokenizer.chat_template"), self.fields.texts("tokenizer.ggml.tokens")
            ids += [tokens.index(token) for token in TURN_ENDS if token in template and token in tokens]
        if not ids:
            raise self.fields.error("tokenizer.ggml.eos_token_id", "without it no answer would end")
        return list(dict.fromkeys(ids))

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _integer(self, name: str) -> int:
        return self.fields.integer(self._key(name))

    def _checkpoint_name(self, name: str) -> str:
        module, _, parameter = name.rpartition(".")
        if module in MODULE_NAMES:
            return f"{MODULE_NAMES[module]}.{parameter}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        if match is None or match[2] not in LAYER_MODULE_NAMES:
            raise ValueError(f"{self.path}: tensor {name} has no place in {ARCHITECTURES[self.architecture][0]}")
        return f"model.layers.{match[1]}.{LAYER_MODULE_NAMES[match[2]]}.{parameter}"


def _unpermute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows from pairs (2i, 2i + 1) within a head, as llama.cpp rotates them, to pairs (i, i + head_dim / 2)."""
    pairs = weights.reshape(num_heads, -1, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)
