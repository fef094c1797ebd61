"""Multi-token prediction modules, stored behind the target's layers (DeepSeek-V3 report, 2412.19437, section 2.2).

A row at position p holds a hidden state h_p and the next token t_(p+1), and predicts t_(p+2):

    e = embedding(t_(p+1)), zero where p is 0
    pre = decoder layer(projection([norm(e), norm(h_p)])), at RoPE position p and with KV of its own
    logits = head(norm(pre))

Embedding and head are the target's own tensors, but where the checkpoint stores others for the module.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kernels import ops
from kernels.metadata import AttentionMetadata
from models.causal_lm import CausalLM
from models.kv_spec import LayerKVSpec
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding, vocab_logits
from models.layers.linear import ReplicatedLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.loader import HARMLESS_EXTRAS, Destination, fill, find_destinations, match_tensors, names_elsewhere
from models.model_config import ModelConfig
from models.registry import ARCHITECTURES
from models.weight_index import StoredTensor, WeightIndex, read_weight_index

COMPARED_ROWS = 4096  # of two stored matrices at a time


@dataclass(frozen=True)
class MTPFamily:
    """How a family of checkpoints stores its modules, and in which order it joins the projection's two inputs."""

    prefix: str  # of a module's tensors; {layer} counts on from the target's last layer, {module} from 0
    names: dict[str, str]  # our submodule: the checkpoint's, behind the prefix
    embedding_first: bool


FAMILIES = {  # by the target's architecture
    "DeepseekV3ForCausalLM": MTPFamily(
        prefix="model.layers.{layer}.",
        names={
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "layer": "",
            "norm": "shared_head.norm",
            "head": "shared_head.head",
            "embed_tokens": "embed_tokens",
        },
        embedding_first=True,
    ),
}


class MTPModule(nn.Module):
    """One module: what joins its two inputs, a decoder layer, and the norm before the head."""

    def __init__(
        self, config: ModelConfig, layer_index: int, rotary: RotaryEmbedding, own_embedding: bool, own_head: bool
    ) -> None:
        super().__init__()
        hidden_size, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.enorm = RMSNorm(hidden_size, eps, dtype)
        self.hnorm = RMSNorm(hidden_size, eps, dtype)
        self.eh_proj = ReplicatedLinear(2 * hidden_size, [hidden_size], bias=False, dtype=dtype)
        self.layer = ARCHITECTURES[config.architecture].decoder_layer(config, layer_index, rotary)
        self.norm = RMSNorm(hidden_size, eps, dtype)
        sizes = config.vocab_size, hidden_size, dtype
        self.embed_tokens = VocabParallelEmbedding(*sizes, is_head=False) if own_embedding else None
        self.head = ParallelLMHead(*sizes) if own_head else None


class DeepseekMTP(nn.Module):
    """All modules of a checkpoint, in order. A module's input is the output of the one before it, or the target's.

    `hidden_is_normed` says which hidden states of the target the first module is given: those after the final norm
    (as vLLM, SGLang and lmdeploy do), or before it; the target hands out those that are wanted.
    `recycled_is_normed` says which output goes on to the next draft: after the module's norm, or before it.
    """

    def __init__(
        self,
        modules: list[MTPModule],
        family: MTPFamily,
        target: CausalLM,
        hidden_is_normed: bool,
        recycled_is_normed: bool,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self.num_modules = len(modules)
        self.hidden_size, self.dtype = target.config.hidden_size, target.config.dtype
        self.hidden_is_normed = hidden_is_normed
        self.recycled_is_normed = recycled_is_normed
        self._modules_in_order = modules
        self._family = family
        self._shared = (target.model.embed_tokens, target.head)  # in a tuple: they are no submodules of this one

    def kv_specs(self) -> list[LayerKVSpec]:
        """What every module's layer stores of a token on this rank."""
        return [module.layer.kv_spec for module in self._modules_in_order]

    def forward(
        self,
        module_index: int,
        token_ids: torch.Tensor,  # [num_tokens]: of a row at position p, token p + 1 (of a later module: p + 1 + index)
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]: the target's at p, or the last module's output
        positions: torch.Tensor,  # [num_tokens]: p; 0 for padding
        kv_layer: tuple[torch.Tensor, ...],
        attention: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]: what the next draft, or the next module, is given
        module = self._modules_in_order[module_index]
        embedding = self._shared[0] if module.embed_tokens is None else module.embed_tokens
        enorm, hnorm = module.enorm, module.hnorm
        joined = ops.join_norms(
            embedding(token_ids),
            enorm.weight,
            hidden_states,
            hnorm.weight,
            enorm.eps,
            positions,
            second_leads=not self._family.embedding_first,
        )
        hidden_states, residual = module.layer(module.eh_proj(joined), None, positions, kv_layer, attention)
        normed, unnormed = module.norm.add(hidden_states, residual)
        return normed if self.recycled_is_normed else unnormed

    def logits(
        self,
        module_index: int,
        outputs: torch.Tensor,  # [num_rows, hidden_size], of `forward`
    ) -> torch.Tensor:
        """fp32 [num_rows, vocab_size]."""
        module = self._modules_in_order[module_index]
        head = self._shared[1] if module.head is None else module.head
        return vocab_logits(outputs if self.recycled_is_normed else module.norm(outputs), head.weight)


def find_modules(folder: Path, config: ModelConfig) -> WeightIndex:
    """Where a checkpoint's tensors are, those of every module among them; reads no weight.

    Raises ValueError where the checkpoint has no modules, or lacks one that it counts.
    """
    config_path, num_counted = folder / "config.json", config.num_nextn_predict_layers
    if config.architecture not in FAMILIES:
        raise ValueError(
            f'{config_path}: architectures is ["{config.architecture}"], which has no modules of multi-token '
            f"prediction; known are those of {', '.join(FAMILIES)}: choose another speculative method"
        )
    index = read_weight_index(folder)
    prefixes = [module_prefix(config, i) for i in range(max(num_counted, 1))]
    missing = [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in index.tensors)]
    if not num_counted:
        remedy = "choose another speculative method, or a checkpoint with its MTP layer"
        if not missing:
            remedy = f"correct it, since the checkpoint holds tensors {prefixes[0]}*"
        raise ValueError(
            f"{config_path}: num_nextn_predict_layers is 0 or missing, so there is no module of multi-token "
            f"prediction: {remedy}"
        )
    if missing:
        raise ValueError(
            f"{folder} holds no tensor {missing[0]}*, module {prefixes.index(missing[0])} of the {num_counted} "
            "that num_nextn_predict_layers in config.json promises: take a checkpoint with its MTP layer, "
            "or choose another speculative method"
        )
    return index


def module_prefix(config: ModelConfig, module_index: int) -> str:
    """What the names of a module's tensors begin with."""
    prefix = FAMILIES[config.architecture].prefix
    return prefix.format(layer=config.num_hidden_layers + module_index, module=module_index)


def load_mtp(
    folder: Path,
    target: CausalLM,  # of the same folder
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    hidden_is_normed: bool = True,
    recycled_is_normed: bool = True,
) -> DeepseekMTP:
    """The modules of the target's checkpoint in eval mode; the target hands out the hidden states that they want.

    Raises ValueError where the checkpoint has none, or not the whole of one.
    """
    config = target.config
    assert dtype == config.dtype, "modules share the target's embedding and head"
    index, family = find_modules(folder, config), FAMILIES[config.architecture]
    modules = [_load_module(i, family, index, target, device, progress) for i in range(config.num_nextn_predict_layers)]
    target.hidden_is_normed = hidden_is_normed
    return DeepseekMTP(modules, family, target, hidden_is_normed, recycled_is_normed).eval()


def _load_module(
    module_index: int,
    family: MTPFamily,
    index: WeightIndex,
    target: CausalLM,
    device: torch.device,
    progress: bool,
) -> MTPModule:
    config = target.config
    prefix = module_prefix(config, module_index)
    own = WeightIndex(index.folder, {name: each for name, each in index.tensors.items() if name.startswith(prefix)})
    embedding, head = (f"{prefix}{family.names[name]}.weight" for name in ("embed_tokens", "head"))
    target_embedding = "model.embed_tokens.weight"
    own_embedding = _differs(index, embedding, target_embedding)
    own_head = _differs(index, head, target_embedding if config.tie_word_embeddings else "lm_head.weight")
    layer_index = config.num_hidden_layers + module_index
    module = MTPModule(config, layer_index, target.model.rotary, own_embedding, own_head)
    destinations = _renamed(find_destinations(module), prefix, family)
    harmless = [HARMLESS_EXTRAS, *([] if own_embedding else [embedding]), *([] if own_head else [head])]
    try:
        layer = family.names["layer"]  # the one submodule of which a rank may lack something whole
        elsewhere = names_elsewhere(module.layer, f"{prefix}{layer}." if layer else prefix)
        tensors = match_tensors(own, destinations, config, "|".join(harmless), elsewhere)
    except ValueError as error:
        raise ValueError(
            f"module {module_index} of multi-token prediction can not be loaded: {error}: take a checkpoint with the "
            "whole of its MTP layer, or choose another speculative method"
        ) from error
    fill(destinations, tensors, device, progress)
    return module


def _renamed(destinations: dict[str, Destination], prefix: str, family: MTPFamily) -> dict[str, Destination]:
    """The same under the checkpoint's names."""
    renamed = {}
    for name, destination in destinations.items():
        submodule, _, rest = name.partition(".")
        stored = family.names[submodule]
        renamed[f"{prefix}{stored}.{rest}" if stored else f"{prefix}{rest}"] = destination
    return renamed


def _differs(index: WeightIndex, name: str, target_name: str) -> bool:
    """Whether a module's own matrix is stored and is not, byte for byte, the target's."""
    own, targets = index.tensors.get(name), index.tensors.get(target_name)
    if own is None:
        return False
    if targets is None or (own.dtype, own.shape) != (targets.dtype, targets.shape):
        return True
    return not all(
        torch.equal(_bytes_of(own, rows), _bytes_of(targets, rows))
        for rows in (slice(start, start + COMPARED_ROWS) for start in range(0, own.shape[0], COMPARED_ROWS))
    )


def _bytes_of(tensor: StoredTensor, rows: slice) -> torch.Tensor:
    end = min(rows.stop, tensor.shape[0])
    return tensor.read((slice(rows.start, end), slice(0, tensor.shape[1]))).view(torch.uint8)
