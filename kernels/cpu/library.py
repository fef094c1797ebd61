"""The compiled kernels as functions of integers and addresses."""

import ctypes
import functools
import logging
from pathlib import Path

from kernels.cpu.compiler import CompilationError, build_library, cache_folder

logger = logging.getLogger(__name__)

_INT, _SIZE, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_LINEAR = (_SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _INT, _INT)

# Argument types by function, in the order of its definition in C; a function returns an int if it can fail.
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "has_amx": (_INT, ()),
    "linear_float": (_INT, _LINEAR),
    "linear_bf16": (_INT, _LINEAR),
    "grouped_linear": (
        _INT,
        (_SIZE, _SIZE, _POINTER, *(_SIZE,) * 4, _INT, _POINTER, _SIZE, _POINTER, _POINTER, _INT),
    ),
    "rms_norm": (None, (_SIZE, _SIZE, _SIZE, _INT, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _FLOAT)),
    "join_norms": (
        None,
        (
            _SIZE,
            _SIZE,
            _SIZE,
            _INT,
            _INT,
            _FLOAT,
            *(_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE),
            *(_POINTER,) * 2,
        ),
    ),
    "silu_and_mul": (None, (_SIZE, _SIZE, _SIZE, _INT, _POINTER, _SIZE, _POINTER)),
    "rotary_embedding": (
        _INT,
        (*(_SIZE,) * 6, _INT, _INT, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE),
    ),
    "store_kv": (_INT, (_SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER)),
    "embedding": (_INT, (_SIZE, _SIZE, _SIZE, _INT, _POINTER, _POINTER, _POINTER)),
    "qkv_attention": (
        _INT,
        (
            *(_SIZE,) * 10,
            *(_INT, _INT, _FLOAT, _FLOAT),
            *(_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE),
            *(_POINTER,) * 6,
            *(_SIZE, _POINTER),
        ),
    ),
    "paged_attention": (
        _INT,
        (*(_SIZE,) * 8, _INT, _FLOAT, _POINTER, _SIZE, *(_POINTER,) * 5, _SIZE, _POINTER),
    ),
}


class Library:
    """The functions of one compiled library.

    `held` keeps Python's lock during a call, for calls of a few microseconds: letting go of the lock
    invites another thread in and waits for it to leave. `released` lets other threads run.
    """

    def __init__(self, path: Path) -> None:
        self.held = _declare(ctypes.PyDLL(str(path)))
        self.released = _declare(ctypes.CDLL(str(path)))


@functools.cache
def load_library() -> Library | None:
    """The kernels for this machine, compiled if need be; None, said once in the log, where they cannot be."""
    try:
        library = Library(build_library(cache_folder()))
    except (CompilationError, OSError) as error:
        logger.warning("The CPU is served by torch's operators, which are slower than the compiled kernels: %s", error)
        return None
    if library.held.has_amx():
        logger.info("The CPU's matrix unit (AMX) multiplies bf16 weights; FORERUN_NO_AMX=1 forbids it")
    return library


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
