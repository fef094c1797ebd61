"""Tiny random checkpoints and a tiny tokenizer, written as Hugging Face folders.

    folder = make_tiny_checkpoint(tmp_path / "target", architecture="llama", num_hidden_layers=4)
    draft = make_tiny_checkpoint(tmp_path / "draft", architecture="llama", num_hidden_layers=2)

A parameter depends on its name, its shape and the seed alone, so the draft above is the target cut
short: it agrees with the target often, not always.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS_TOKEN, EOS_TOKEN = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", BOS_TOKEN, EOS_TOKEN)  # ids 0, 1, 2
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps under the tree in the garden",
    "a server answers the request of a client, and the client reads what the server has sent to it",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# name: (transformers model type, what differs from SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama_bias": ("llama", {"attention_bias": True, "head_dim": 24}),
    "llama_tied": (
        "llama",
        {"tie_word_embeddings": True, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral": ("mistral", {"sliding_window": 9}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def make_tiny_checkpoint(
    folder: Path,
    architecture: str = "llama",
    with_tokenizer: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,  # fields of the transformers configuration
) -> Path:
    """Writes config.json, generation_config.json, model.safetensors and the tiny tokenizer; returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, differences = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(model_type, **SIZES | differences | overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_parameter(name, parameter.shape, seed))
    model.to(dtype).save_pretrained(folder)
    if with_tokenizer:
        write_tiny_tokenizer(folder)
    return folder


def random_parameter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """fp32, scaled so that attention is far from uniform and logits stand well apart."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode())))
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.5 * noise
    return noise * (1.5 / math.sqrt(shape[-1]))


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 300 tokens with a chat template: any text is encoded, without unknown tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "model_max_length": SIZES["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes on one whole sequence in fp32: [len(token_ids), vocab_size]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]
