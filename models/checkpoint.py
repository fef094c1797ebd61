"""From what a user calls a model to a folder on this machine."""

import hashlib
import json
import re
from pathlib import Path

import torch

from models.gguf import convert_gguf, source_of

CACHE_FOLDER = Path.home() / ".cache" / "forerun"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_COPIES = ["consolidated*", "original/*"]  # the same weights in another form


def resolve_checkpoint(
    model: str,
    progress: bool,
    dtype: torch.dtype | None = None,
    cache_folder: Path = CACHE_FOLDER,
) -> Path:
    """A Hugging Face folder as it is; a .gguf converted, once, to `dtype` (None: bf16); a hub id downloaded.

    Raises ValueError, saying what was looked for, where there is no such model.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _converted(path, dtype or torch.bfloat16, cache_folder, progress)
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
            remedy = f"name one of its files: {ggufs}" if ggufs else "give the folder of a Hugging Face checkpoint"
            raise ValueError(f"model {model} is a folder without config.json: {remedy}")
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ValueError(f"model {model} is neither a folder nor a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct")
    return _downloaded(model, progress)


def _converted(path: Path, dtype: torch.dtype, cache_folder: Path, progress: bool) -> Path:
    source = source_of(path, dtype)
    digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder / "gguf" / f"{path.stem}-{source['dtype']}-{digest}"
    convert_gguf(path, folder, dtype, progress)
    return folder


def _downloaded(model: str, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()  # for the whole process: the hub's client knows no narrower switch
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES))
    except (OSError, ValueError) as error:  # unreachable, unknown, or not a valid id
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model {model} is no folder here, and the hub does not give it ({type(error).__name__}: {reason}): "
            "give a folder, a .gguf file, or a hub id that can be reached"
        ) from error
