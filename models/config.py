"""Reading a checkpoint's configuration."""

from dataclasses import replace
from pathlib import Path

from models.config_fields import ConfigFields
from models.model_config import ModelConfig
from models.registry import ARCHITECTURES
from models.weight_index import read_weight_index

__all__ = ["ModelConfig", "config_from", "read_model_config"]


def read_model_config(folder: Path) -> ModelConfig:
    """What config.json says, every assumption of the code checked; ends of run also from generation_config.json.

    Raises ValueError for a missing file, an unknown architecture, or a value that is not implemented.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a Hugging Face checkpoint")
    fields = ConfigFields.read(path)
    check_architecture(fields)
    if "dtype" not in fields and "torch_dtype" not in fields:
        fields = fields.filled(dtype=read_weight_index(Path(folder)).dtype_name)
    config = config_from(fields)

    generation_path = path.with_name("generation_config.json")
    eos_token_ids = config.eos_token_ids
    if generation_path.is_file():
        eos_token_ids += ConfigFields.read(generation_path).token_ids("eos_token_id")
    beyond = [token for token in eos_token_ids if token >= config.vocab_size]
    if beyond:
        raise ValueError(
            f"{path} or {generation_path.name}: eos_token_id {beyond[0]} is not below vocab_size, {config.vocab_size}"
        )
    return replace(config, eos_token_ids=tuple(dict.fromkeys(eos_token_ids)))


def config_from(fields: ConfigFields) -> ModelConfig:
    """What the fields of a config.json say, without its weights.

    Raises ValueError for an unknown architecture, or a value that is not implemented.
    """
    return ARCHITECTURES[check_architecture(fields)].read_config(fields)


def check_architecture(fields: ConfigFields) -> str:
    """Raises ValueError unless there is one, and it is implemented."""
    names = fields.texts("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise fields.error("architectures", f"implemented are {', '.join(ARCHITECTURES)}")
    return names[0]
