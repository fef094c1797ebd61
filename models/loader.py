"""Brings a checkpoint's weights into a model, tensor by tensor."""

import ctypes
import logging
import math
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from kernels import ops
from models.block_fp8 import BlockScaledTensor, ScaledBuffer, begins_with_blocks, pair_with_scales
from models.causal_lm import CausalLM
from models.config import read_model_config
from models.layers.embedding import VocabParallelEmbedding
from models.layers.latent_attention import LatentExpansion
from models.layers.moe import GroupedLinear
from models.layers.parameter import Shard, UnloadedParameter, set_loaded
from models.model_config import ModelConfig
from models.registry import ARCHITECTURES
from models.weight_index import FLOAT_DTYPES, StoredTensor, WeightIndex, read_weight_index

logger = logging.getLogger(__name__)

# Our parameters bear the checkpoint's names, but for matrices that are stored apart and kept as one.
MERGED_MODULES = {  # our module: the checkpoint's, in the order of rows
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "q_kv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
HARMLESS_EXTRAS = r"(.*\.)?rotary_emb\.inv_freq"  # computed, not loaded
HARMLESS_EXTRAS_IF_TIED = r"lm_head\.weight"  # a copy of the embedding
MAX_NAMES = 20  # listed in an error
TRIM_INTERVAL_BYTES = 32 << 20


@dataclass(frozen=True)
class Destination:
    """Where a tensor of the checkpoint goes: some rows of a module's parameter."""

    module: nn.Module
    parameter_name: str
    parameter: UnloadedParameter
    shard: Shard


def load_model(
    folder: Path,
    dtype: torch.dtype | None,  # None: the checkpoint's
    device: torch.device,
    progress: bool,
    max_positions: int | None = None,  # the longest sequence; None: what the checkpoint allows
) -> CausalLM:
    """The model of a checkpoint in eval mode.

    Raises ValueError for what read_model_config refuses, and for missing, unexpected or misshapen weights.
    """
    config = read_model_config(folder)
    if dtype is not None and dtype != config.dtype:
        if torch.finfo(dtype).bits < torch.finfo(config.dtype).bits or _narrows(config.dtype, dtype):
            logger.warning("%s: %s narrows the checkpoint's %s; dtype auto would keep it", folder, dtype, config.dtype)
        config = replace(config, dtype=dtype)
    max_positions = max_positions or config.max_position_embeddings
    model = CausalLM(config, ARCHITECTURES[config.architecture].decoder_layer, max_positions, device)
    load_weights(model, folder, device, progress)
    return model.eval()


def load_weights(model: CausalLM, folder: Path, device: torch.device, progress: bool) -> None:
    """Fills every parameter of the model.

    Raises ValueError unless the checkpoint holds exactly the tensors needed, each of the right shape. Modules of
    multi-token prediction may be there or not: they are a drafter's.
    """
    config = model.config
    harmless = [HARMLESS_EXTRAS]
    if config.tie_word_embeddings:
        harmless.append(HARMLESS_EXTRAS_IF_TIED)
    harmless += [rf"model\.layers\.{config.num_hidden_layers + i}\..*" for i in range(config.num_nextn_predict_layers)]
    index = read_weight_index(folder)
    destinations = find_destinations(model)
    tensors = match_tensors(index, destinations, config, "|".join(harmless), names_elsewhere(model))
    fill(destinations, tensors, device, progress)
    assert not any(isinstance(parameter, UnloadedParameter) for parameter in model.parameters())


class PlainBuffer:
    """A parameter in its own dtype while its tensors arrive."""

    def __init__(self, parameter: UnloadedParameter, device: torch.device) -> None:
        self._tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)

    def take(self, tensor: StoredTensor | BlockScaledTensor, shard: Shard) -> None:
        rows = self._tensor[shard.rows]
        tensor.read_into(shard.part, rows)
        if _narrows(tensor.value_dtype, rows.dtype) and not rows.isfinite().all():
            raise ValueError(f"{tensor.name} holds values beyond the range of {rows.dtype}: use bfloat16 or float32")

    def weight(self) -> torch.Tensor:
        return self._tensor


def fill(
    destinations: dict[str, Destination],
    tensors: dict[str, StoredTensor | BlockScaledTensor],  # of the same names
    device: torch.device,
    progress: bool,
) -> None:
    """Loads tensors in their order; a parameter is allocated when its first arrives and packed after its last.

    So beside the model there is never more than one parameter in two copies.
    """
    stays_scaled = _parameters_that_stay_scaled(destinations, tensors, device)
    buffers: dict[UnloadedParameter, PlainBuffer | ScaledBuffer] = {}  # of which some tensors have arrived
    num_awaited = {each.parameter: len(each.parameter.shards) for each in destinations.values()}
    num_untrimmed_bytes = 0
    num_bytes = sum(parameter.nbytes for parameter in num_awaited)
    with tqdm(
        total=num_bytes,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not progress,
        mininterval=0.1 if sys.stderr.isatty() else 5.0,  # in a log each refresh is a line
    ) as bar:
        for name, tensor in tensors.items():
            destination = destinations[name]
            parameter, shard = destination.parameter, destination.shard
            if parameter not in buffers:
                block_size = stays_scaled.get(parameter)
                buffers[parameter] = (
                    PlainBuffer(parameter, device)
                    if block_size is None
                    else ScaledBuffer(parameter, block_size, device)
                )
            buffers[parameter].take(tensor, shard)
            num_awaited[parameter] -= 1
            if num_awaited[parameter] == 0:
                set_loaded(destination.module, destination.parameter_name, buffers.pop(parameter).weight())
                if isinstance(destination.module, LatentExpansion):
                    destination.module.split()
            num_loaded_bytes = math.prod(part.stop - part.start for part in shard.part) * parameter.dtype.itemsize
            bar.update(num_loaded_bytes)
            num_untrimmed_bytes += num_loaded_bytes
            if num_untrimmed_bytes >= TRIM_INTERVAL_BYTES:
                _return_freed_memory()
                num_untrimmed_bytes = 0
    _return_freed_memory()
    assert not buffers


def _parameters_that_stay_scaled(
    destinations: dict[str, Destination],
    tensors: dict[str, StoredTensor | BlockScaledTensor],
    device: torch.device,
) -> dict[UnloadedParameter, tuple[int, int]]:
    """The block size of parameters that are FP8 in every tensor and are read so by the device's kernels."""
    block_sizes: dict[UnloadedParameter, tuple[int, int]] = {}
    widened = set()
    for name, destination in destinations.items():
        tensor = tensors[name]
        if (
            isinstance(tensor, BlockScaledTensor)
            and destination.parameter.packed
            and not isinstance(destination.module, VocabParallelEmbedding)  # whose rows are read as well
            and ops.reads_block_scaled(device, tensor.block_size)
            and begins_with_blocks(destination.shard, tensor.block_size)
        ):
            block_sizes[destination.parameter] = tensor.block_size
        else:
            widened.add(destination.parameter)
    return {parameter: size for parameter, size in block_sizes.items() if parameter not in widened}


def find_destinations(model: nn.Module, prefix: str = "") -> dict[str, Destination]:
    """By the checkpoint's name, which begins with `prefix`, of every tensor that the model needs."""
    destinations = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, UnloadedParameter):
                continue  # shared with a model that is loaded
            for stored_name, shard in zip(_stored_names(module_name, module), parameter.shards, strict=True):
                name = f"{prefix}{stored_name}.{parameter_name}"
                destinations[name] = Destination(module, parameter_name, parameter, shard)
    return destinations


def names_elsewhere(model: nn.Module, prefix: str = "") -> set[str]:
    """By the checkpoint's name, which begins with `prefix`, the tensors that other ranks hold whole."""
    return {
        f"{prefix}{stored_name}.weight"
        for module_name, module in model.named_modules()
        if isinstance(module, GroupedLinear)
        for stored_name in _names_of_groups(module_name, set(range(module.num_stored)) - set(module.groups))
    }


def _stored_names(module_name: str, module: nn.Module) -> list[str]:
    """The checkpoint's modules that one of ours is made of, in the order of its parameters' shards."""
    if isinstance(module, GroupedLinear):
        return _names_of_groups(module_name, module.groups)
    path, dot, own_name = module_name.rpartition(".")
    return [f"{path}{dot}{name}" for name in MERGED_MODULES.get(own_name, (own_name,))]


def _names_of_groups(module_name: str, groups: Iterable[int]) -> list[str]:
    path, _, own_name = module_name.rpartition(".")
    names = MERGED_MODULES.get(own_name, (own_name,))
    return [f"{path}.{group}.{name}" for group in groups for name in names]


def match_tensors(
    index: WeightIndex,
    destinations: dict[str, Destination],
    config: ModelConfig,
    harmless: str,
    elsewhere: set[str],  # names that are other ranks' business
) -> dict[str, StoredTensor | BlockScaledTensor]:
    """The stored tensors that have a destination, in the order of the files.

    Raises ValueError unless they are exactly those needed, each of the right shape; names that the pattern `harmless`
    matches may be there or not.
    """
    tensors = pair_with_scales(index, config.weight_block_size)
    missing = sorted(destinations.keys() - tensors.keys())
    others = tensors.keys() - destinations.keys() - elsewhere
    unexpected = sorted(name for name in others if not re.fullmatch(harmless, name))
    if missing or unexpected:
        raise ValueError(
            f"the weights in {index.folder} are not those that its config.json describes; "
            f"missing: {listed(missing)}; unexpected: {listed(unexpected)}{_remedy(unexpected, config)}"
        )
    matched = {name: tensor for name, tensor in tensors.items() if name in destinations}
    for name, tensor in matched.items():
        shape, stored = destinations[name].shard.stored_shape, index.tensors[name]
        if tensor.shape != shape:
            raise ValueError(
                f"{stored.path}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        if isinstance(tensor, StoredTensor) and tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{stored.path}: {name} is stored as {tensor.dtype}, not as {', '.join(FLOAT_DTYPES)}")
    return matched


def _remedy(unexpected: list[str], config: ModelConfig) -> str:
    num_counted = config.num_hidden_layers + config.num_nextn_predict_layers
    layers = (re.match(r"model\.layers\.(\d+)\.", name) for name in unexpected)
    if all(layer is None or int(layer[1]) < num_counted for layer in layers):
        return ""
    return (
        f"; config.json counts {config.num_hidden_layers} layers and {config.num_nextn_predict_layers} of multi-token "
        "prediction: correct num_hidden_layers or num_nextn_predict_layers"
    )


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES]) or "none"
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def _narrows(stored: torch.dtype, loaded: torch.dtype) -> bool:
    """Values may overflow: fp16 ends at 65504, where bf16 and fp32 go on."""
    return torch.finfo(loaded).max < torch.finfo(stored).max


def _return_freed_memory() -> None:
    """To the system: glibc keeps the pages of buffers freed between packed weights, up to half the model's size."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
