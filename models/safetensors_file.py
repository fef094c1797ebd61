"""Writing a safetensors file without holding it in memory."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],  # the tensor of a name, of its shape in `shapes`
    progress: bool,
) -> None:
    """Writes tensors of one dtype, read one by one in the order of `shapes`.

    The format: the header's length (8 bytes, little-endian), the header (JSON, padded with spaces so
    that data is aligned), then the data without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (
        path.open("wb") as file,
        tqdm(total=end, desc="Converting", unit="B", unit_scale=True, unit_divisor=1024, disable=not progress) as bar,
    ):
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape in shapes.items():
            tensor = read(name).to(dtype).contiguous()
            assert tensor.shape == shape, f"{name}: {tuple(tensor.shape)} where {shape} was announced"
            bar.update(file.write(tensor.view(torch.uint8).numpy().data))
