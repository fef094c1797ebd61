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
from safetensors.torch import load_file, save_file
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

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
}
DEEPSEEK = {  # a dense layer, then experts; 25 rows of a sequence or more are attended to in the naive form
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_V3 = DEEPSEEK | {"norm_topk_prob": True, "num_nextn_predict_layers": 0}

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
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3_no_q_lora": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | {"topk_method": "group_limited_greedy", "n_shared_experts": 2}),
    "deepseek_v2_lite": (
        "deepseek_v2",
        DEEPSEEK
        | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
        | {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
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
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("inv_freq"):
                parameter.copy_(random_parameter(name, parameter.shape, seed))
    model.to(dtype).save_pretrained(folder)
    add_mtp_modules(folder, overrides.get("num_nextn_predict_layers", 0), seed)
    if with_tokenizer:
        write_tiny_tokenizer(folder)
    return folder


def add_mtp_modules(folder: Path, num_modules: int, seed: int) -> None:
    """Writes what transformers does not: modules of multi-token prediction, as DeepSeek stores them.

    They stand behind the last layer, whose shapes their own layers have, with copies of the embedding and the head.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    hidden_size = tensors["model.norm.weight"].shape[0]
    template = f"model.layers.{num_layers - 1}."
    shapes = {name.removeprefix(template): value.shape for name, value in tensors.items() if name.startswith(template)}
    shapes |= {f"{name}.weight": torch.Size([hidden_size]) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = torch.Size([hidden_size, 2 * hidden_size])
    for i in range(num_modules):
        prefix = f"model.layers.{num_layers + i}."
        for name, shape in shapes.items():
            dtype = tensors[template + name].dtype if template + name in tensors else tensors["lm_head.weight"].dtype
            tensors[prefix + name] = random_parameter(prefix + name, shape, seed).to(dtype)
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if num_modules:
        save_file(tensors, path, metadata={"format": "pt"})


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
