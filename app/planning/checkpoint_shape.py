"""What a plan needs to know of a checkpoint: its config.json, and nothing else."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.worker_loader import DTYPES
from models.config import config_from
from models.config_fields import ConfigFields
from models.gguf_checkpoint import GGUFCheckpoint
from models.model_config import ModelConfig


@dataclass(frozen=True)
class CheckpointShape:
    config: ModelConfig  # with the dtype that is served
    has_fp8_weights: bool
    assumes_dtype: bool = False  # neither the Serve file nor config.json names one; the weights, which do, are not read


def read_checkpoint_shape(
    model: str,  # folder, .gguf file, hub id, or a config.json of any name
    dtype: str,  # of the Serve file; auto: the checkpoint's
) -> CheckpointShape:
    """Reads a configuration; of a hub id that file alone is fetched.

    Raises ValueError where there is none, or it is not implemented.
    """
    served = DTYPES.get(dtype)
    fields = _fields(model, served or torch.bfloat16)
    assumes_dtype = served is None and not {"dtype", "torch_dtype"} & fields.names()
    if served is not None:
        fields = fields.filled(dtype=dtype)
    elif assumes_dtype:
        fields = fields.filled(dtype="bfloat16")
    config = config_from(fields)
    if served is not None:
        config = replace(config, dtype=served)
    return CheckpointShape(config, "quantization_config" in fields, assumes_dtype)


def _fields(model: str, dtype: torch.dtype) -> ConfigFields:
    path = Path(model)
    if path.suffix == ".gguf":
        return ConfigFields(GGUFCheckpoint(path).config(dtype), model)
    if path.is_dir():
        path = path / "config.json"
    return ConfigFields.read(path if path.is_file() else _fetched(model))


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except (OSError, ValueError) as error:  # unreachable, unknown, or not a valid id
        raise ValueError(
            f"model {hub_id} is no folder here, and the hub does not give its config.json ({type(error).__name__}): "
            "name a config.json with --model-config (of a draft model: --draft-config)"
        ) from error


def given_config(path: Path) -> str:
    """The file, or the folder that holds one, in the place of a model.

    Raises ValueError where there is none.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no config.json, nor a folder that holds one: {error}") from None
    return str(file.resolve())
