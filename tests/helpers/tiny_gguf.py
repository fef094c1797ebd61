"""Writes a tiny Hugging Face checkpoint as a GGUF file, in llama.cpp's names and layouts."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    folder: Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **extra: Any,  # further keys of the architecture
) -> dict[str, torch.Tensor]:
    """Matrices are quantised, vectors stay fp32; returns what the file holds, dequantised, in Hugging Face's form."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in extra.items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config["rope_parameters"], head_dim))
    write_tokenizer(writer, folder)

    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights = tensor.float().numpy()
        num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        kind = quantization if weights.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weights, kind)  # rows are quantised one by one, so they may be reordered after
        held[name] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = data.reshape(num_heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, special = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if token in special else 1 for token in range(len(vocab))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)  # the end of a text; that of a message stands in the chat template
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def gguf_name(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    if module in TENSOR_NAMES:
        return f"{TENSOR_NAMES[module]}.{parameter}"
    _, _, layer, own_name = module.split(".", 3)
    return f"blk.{layer}.{TENSOR_NAMES[own_name]}.{parameter}"


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What llama.cpp stores of Llama 3's scaling: the divisor of each pair's frequency."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
