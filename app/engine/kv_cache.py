"""The paged KV pool of a worker."""

import torch

from models.kv_spec import LayerKVSpec


class KVCache:
    """One pool a layer and shape, all on the same block table; a drafter's layers follow the target's.

    `layers[i]` is a tuple of tensors [num_blocks, block_size, *shape].
    """

    def __init__(self, specs: list[LayerKVSpec], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.layers = [
            tuple(
                torch.zeros((num_blocks, block_size, *shape), dtype=spec.dtype, device=device) for shape in spec.shapes
            )
            for spec in specs
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


def block_bytes(specs: list[LayerKVSpec], block_size: int) -> int:
    """Bytes of one block over all layers."""
    return block_size * sum(spec.token_bytes for spec in specs)
