"""What the launchers of the CPU kernels share: the library's functions, and tensors in the layouts that these read."""

import ctypes

import torch

from kernels.cpu.library import Library, load_library

# Calls of at most so many rows keep Python's lock: they are over sooner than another thread would return it.
MAX_HELD_ROWS = 64


def loaded_library() -> Library:
    library = load_library()
    assert library is not None, "is_available() was not asked"
    return library


def functions(num_rows: int) -> ctypes.CDLL:
    library = loaded_library()
    return library.held if num_rows <= MAX_HELD_ROWS else library.released


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., W] as rows [T, W] of contiguous elements, copied only where there is no such view."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """[T, num_heads, D] with the heads of a token contiguous, as in a slice of qkv; else a copy."""
    num_heads, head_dim = x.shape[1], x.shape[2]
    return x if x.stride(2) == 1 and (x.stride(1) == head_dim or num_heads == 1) else x.contiguous()


def check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("a CPU kernel could not allocate its scratch memory")
