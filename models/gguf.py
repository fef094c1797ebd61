"""Converts a GGUF file to a Hugging Face folder, once.

python -m models.gguf FILE.gguf OUT_FOLDER [--dtype bfloat16|float16|float32]
"""

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from models.config_fields import JsonObject
from models.decoder_config import DTYPES
from models.gguf_checkpoint import GGUFCheckpoint
from models.safetensors_file import write_safetensors

SOURCE_NAME = "gguf_source.json"  # in the folder: what it was made from
FORMAT = 1  # raised when a folder made before would be made differently now


def convert_gguf(path: Path, out_folder: Path, dtype: torch.dtype, progress: bool = True) -> bool:
    """Writes weights in `dtype`, configuration, tokenizer and chat template; False where they are up to date.

    The folder appears whole or not at all, and is replaced when the file or the dtype is another.
    Raises ValueError for a file that cannot be converted, or a folder that is not ours to replace.
    """
    source = source_of(path, dtype)
    if _made_from(out_folder, source):
        return False
    if out_folder.exists() and not (out_folder / SOURCE_NAME).is_file():
        raise ValueError(f"{out_folder} was not made by this converter: give a new folder")
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_folder.name}-", dir=out_folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        _write(GGUFCheckpoint(path), made, dtype, progress)
        _write_json(made / SOURCE_NAME, source)
        _install(made, out_folder, source, set_aside=Path(work) / "old")
    return True


def source_of(path: Path, dtype: torch.dtype) -> JsonObject:
    """Tells apart files, and what is made of them. Raises ValueError where there is no file."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    status = path.stat()
    return {
        "name": path.name,
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "dtype": str(dtype).removeprefix("torch."),
        "format": FORMAT,
    }


def _write(checkpoint: GGUFCheckpoint, folder: Path, dtype: torch.dtype, progress: bool) -> None:
    from transformers import AutoTokenizer  # seconds to import, and needed only here

    _write_json(folder / "config.json", checkpoint.config(dtype))
    _write_json(folder / "generation_config.json", checkpoint.generation_config())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    tokenizer.save_pretrained(folder)
    write_safetensors(folder / "model.safetensors", checkpoint.shapes, dtype, checkpoint.read, progress)


def _install(made: Path, out_folder: Path, source: JsonObject, set_aside: Path) -> None:
    """Moves `made` into place. Of two processes at it, one finds the other's folder there and leaves it."""
    if not _made_from(out_folder, source):
        with suppress(FileNotFoundError):
            out_folder.rename(set_aside)
    try:
        made.rename(out_folder)
    except OSError:
        if not _made_from(out_folder, source):
            raise


def _made_from(folder: Path, source: JsonObject) -> bool:
    path = folder / SOURCE_NAME
    return path.is_file() and json.loads(path.read_text()) == source


def _write_json(path: Path, values: JsonObject) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.gguf", description="GGUF file to Hugging Face folder.")
    parser.add_argument("file", type=Path)
    parser.add_argument("out_folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    try:
        converted = convert_gguf(arguments.file, arguments.out_folder, DTYPES[arguments.dtype])
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.out_folder} {'written' if converted else 'is up to date'}")


if __name__ == "__main__":
    main()
