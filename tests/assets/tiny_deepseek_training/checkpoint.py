"""Writing the trained network as a Hugging Face folder with DeepSeek's tensor names, and reading it back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.assets.tiny_deepseek_training.corpus import BEGIN, CHAT_TEMPLATE, END, token_id
from tests.assets.tiny_deepseek_training.network import Network
from tests.assets.tiny_deepseek_training.shape import Shape

KEPT_FP32 = "e_score_correction_bias"


def release_tensors(network: Network) -> dict[str, Tensor]:
    """Tensors as DeepSeek's release names them: experts one by one, the MTP layer with copies of embedding and head."""
    tensors = {}
    for name, tensor in network.state_dict().items():
        before, _, projection = name.rpartition(".experts.")
        if before:
            for index, expert in enumerate(tensor):
                tensors[f"{before}.experts.{index}.{projection}.weight"] = expert
        else:
            tensors[name] = tensor
    mtp = f"model.layers.{network.shape.num_hidden_layers}"
    tensors[f"{mtp}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{mtp}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return {
        name: tensor.contiguous() if name.endswith(KEPT_FP32) else tensor.bfloat16().contiguous()
        for name, tensor in tensors.items()
    }


def write_checkpoint(folder: Path, network: Network, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos = token_id(tokenizer, BEGIN), token_id(tokenizer, END)
    save_file(release_tensors(network), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", network.shape.hf_config(bos, eos))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": END,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": network.shape.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def read_network(folder: Path, shape: Shape) -> Network:
    """The network with the written bf16 values, in fp32."""
    tensors = load_file(folder / "model.safetensors")
    network = Network(shape)
    state = network.state_dict()
    for name in state:
        before, _, projection = name.rpartition(".experts.")
        if before:
            names = [f"{before}.experts.{index}.{projection}.weight" for index in range(shape.n_routed_experts)]
            state[name] = torch.stack([tensors[one] for one in names]).float()
        else:
            state[name] = tensors[name].float()
    network.load_state_dict(state)
    return network.eval()


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
