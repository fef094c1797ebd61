"""Which tensors a safetensors checkpoint holds, and in which file each is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models.config_fields import ConfigFields

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class StoredTensor:
    name: str
    path: Path
    dtype: str  # safetensors' name: BF16, F32, ...
    shape: tuple[int, ...]

    @property
    def value_dtype(self) -> torch.dtype:
        return FLOAT_DTYPES[self.dtype]

    def read_into(self, part: tuple[slice, ...], out: torch.Tensor) -> None:
        """Some of the tensor, into `out` of any dtype."""
        out.copy_(self.read(part))

    def read(self, part: tuple[slice, ...]) -> torch.Tensor:
        """Some of the tensor, on the CPU.

        The file is opened anew, so that no mapping keeps the pages of tensors read before.
        """
        with _opened(self.path) as file:
            return file.get_slice(self.name)[part]


@dataclass(frozen=True)
class WeightIndex:
    folder: Path
    tensors: dict[str, StoredTensor]

    @property
    def dtype_name(self) -> str:
        """config.json's name for the dtype of the first floating-point tensor."""
        for tensor in self.tensors.values():
            if tensor.dtype in FLOAT_DTYPES:
                return str(FLOAT_DTYPES[tensor.dtype]).removeprefix("torch.")
        raise ValueError(
            f"{self.folder} holds no weights in {', '.join(FLOAT_DTYPES)}, nor does config.json say a dtype"
        )


def read_weight_index(folder: Path) -> WeightIndex:
    """Every tensor of the checkpoint: from the file that the index names for it, or of the single file.

    Other files and other copies of a tensor do not count. Raises ValueError for a missing or broken file.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        tensors = _read_sharded(folder, index_path)
    elif (folder / SINGLE_NAME).is_file():
        tensors = _read_headers(folder / SINGLE_NAME)
    else:
        raise ValueError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}: convert its weights to safetensors")
    return WeightIndex(folder, tensors)


def _read_sharded(folder: Path, index_path: Path) -> dict[str, StoredTensor]:
    weight_map = ConfigFields.read(index_path).section("weight_map")
    shard_of = {name: weight_map.text(name) for name in weight_map.names()}
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{index_path} names shards that are not there: {', '.join(missing)}")
    tensors = {}
    for shard in shards:
        stored = _read_headers(folder / shard)
        wanted = {name for name in shard_of if shard_of[name] == shard}
        if absent := sorted(wanted - stored.keys()):
            raise ValueError(f"{index_path} places {', '.join(absent)} in {shard}, which does not hold them")
        tensors.update({name: tensor for name, tensor in stored.items() if name in wanted})
    return tensors


def _read_headers(path: Path) -> dict[str, StoredTensor]:
    tensors = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            stored = file.get_slice(name)
            tensors[name] = StoredTensor(name, path, stored.get_dtype(), tuple(stored.get_shape()))
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
