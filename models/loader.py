"""Brings a checkpoint's weights into a model, tensor by tensor."""

import ctypes
import logging
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from models.causal_lm import CausalLM
from models.config import read_model_config
from models.layers.parameter import Shard, UnloadedParameter, set_loaded
from models.registry import ARCHITECTURES
from models.weight_index import FLOAT_DTYPES, StoredTensor, WeightIndex, read_weight_index

logger = logging.getLogger(__name__)

# Our parameters bear the checkpoint's names, but for matrices that are stored apart and kept as one.
MERGED_MODULES = {  # our module: the checkpoint's, in the order of rows
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
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
    """Fills every parameter; each is allocated when its first tensor arrives and packed after its last.

    So beside the model there is never more than one parameter in two copies.
    """
    destinations = find_destinations(model)
    stored = _matched(read_weight_index(folder), destinations, tied=model.config.tie_word_embeddings)
    buffers: dict[UnloadedParameter, torch.Tensor] = {}  # parameters of which some tensors have arrived
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
        for name, tensor in stored.items():
            destination = destinations[name]
            parameter, shard = destination.parameter, destination.shard
            if parameter not in buffers:
                buffers[parameter] = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            rows = buffers[parameter][shard.rows]
            rows.copy_(tensor.read(shard.part))
            if _narrows(FLOAT_DTYPES[tensor.dtype], rows.dtype) and not rows.isfinite().all():
                raise ValueError(f"{name} holds values beyond the range of {rows.dtype}: use bfloat16 or float32")
            num_awaited[parameter] -= 1
            if num_awaited[parameter] == 0:
                set_loaded(destination.module, destination.parameter_name, buffers.pop(parameter))
            bar.update(rows.nbytes)
            num_untrimmed_bytes += rows.nbytes
            if num_untrimmed_bytes >= TRIM_INTERVAL_BYTES:
                _return_freed_memory()
                num_untrimmed_bytes = 0
    _return_freed_memory()
    assert not buffers
    assert not any(isinstance(parameter, UnloadedParameter) for parameter in model.parameters())


def find_destinations(model: nn.Module) -> dict[str, Destination]:
    """By the checkpoint's name of every tensor that the model needs."""
    destinations = {}
    for module_name, module in model.named_modules():
        path, dot, own_name = module_name.rpartition(".")
        for parameter_name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, UnloadedParameter), f"{module_name}.{parameter_name} is loaded already"
            stored_names = MERGED_MODULES.get(own_name, (own_name,))
            for stored_name, shard in zip(stored_names, parameter.shards, strict=True):
                name = f"{path}{dot}{stored_name}.{parameter_name}"
                destinations[name] = Destination(module, parameter_name, parameter, shard)
    return destinations


def _matched(index: WeightIndex, destinations: dict[str, Destination], tied: bool) -> dict[str, StoredTensor]:
    """The stored tensors that have a destination, in the order of the files.

    Raises ValueError unless they are exactly those needed, each of the right shape.
    """
    harmless = re.compile(f"{HARMLESS_EXTRAS}|{HARMLESS_EXTRAS_IF_TIED}" if tied else HARMLESS_EXTRAS)
    missing = sorted(destinations.keys() - index.tensors.keys())
    extras = index.tensors.keys() - destinations.keys()
    unexpected = sorted(name for name in extras if not harmless.fullmatch(name))
    if missing or unexpected:
        raise ValueError(
            f"the weights in {index.folder} are not those that its config.json describes; "
            f"missing: {_listed(missing)}; unexpected: {_listed(unexpected)}"
        )
    matched = {name: tensor for name, tensor in index.tensors.items() if name in destinations}
    for name, tensor in matched.items():
        shape = destinations[name].shard.stored_shape
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{tensor.path}: {name} is stored as {tensor.dtype}, not as {', '.join(FLOAT_DTYPES)}")
    return matched


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES]) or "none"
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def _narrows(stored: torch.dtype, loaded: torch.dtype) -> bool:
    """Values may overflow: fp16 ends at 65504, where bf16 and fp32 go on."""
    return torch.finfo(loaded).max < torch.finfo(stored).max


def _return_freed_memory() -> None:
    """To the system: glibc keeps the pages of buffers freed between packed weights, up to half the model's size."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
