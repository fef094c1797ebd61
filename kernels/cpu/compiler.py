"""Compiles the C sources of this folder once, into the user's cache."""

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
SOURCES = ("amx_tile.c", "attention.c", "dot_tile.c", "layers.c", "linear.c", "parallel.c", "value_sum.c")
HEADERS = ("amx_tile.h", "attention_tile.h", "dot_tile.h", "layers.h", "parallel.h", "simd.h", "value_sum.h")
# Contraction off: a kernel fuses a product and a sum where its source says so, in all of its instances alike.
COMMON_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-pthread")
# The first that compiler and assembler take; some know the host's CPU under another flag, or not the whole of it.
WITHOUT_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
TARGET_FLAGS = (("-march=native",), ("-march=native", *WITHOUT_AMX), ("-mcpu=native",), ())


class CompilationError(RuntimeError):
    """No library could be made of the sources; the message says why."""


def find_compiler() -> list[str] | None:
    """The command of a C compiler: $CC, cc, gcc or clang."""
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "kernels"


def build_library(folder: Path, target_flags: tuple[tuple[str, ...], ...] = TARGET_FLAGS) -> Path:
    """The compiled library in `folder`, made by this call if no earlier one has.

    Its name is a hash of all that it depends on: sources, flags, compiler and CPU. Processes that
    build at once each write a file of their own and rename it, so that all load a whole one.

    Raises:
        CompilationError: there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilationError("no C compiler was found: install cc, gcc or clang, or name one in CC")
    library = folder / f"{_fingerprint(compiler, target_flags)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(_compile(compiler, target_flags, Path(scratch)), library)
    except OSError as error:
        raise CompilationError(f"the CPU kernels could not be written to {folder}: {error}") from error
    return library


def _compile(compiler: list[str], target_flags: tuple[tuple[str, ...], ...], scratch: Path) -> Path:
    errors = ""
    for flags in target_flags:
        command = [*compiler, *COMMON_FLAGS, *flags]
        objects = [scratch / f"{source}.o" for source in SOURCES]
        compilations = [
            subprocess.Popen(
                [*command, "-c", str(SOURCE_FOLDER / source), "-o", str(target)],
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
            for source, target in zip(SOURCES, objects, strict=True)
        ]
        # Every one is waited for, failed or not: none may be left behind.
        outputs = [compilation.communicate()[1] for compilation in compilations]
        if any(compilation.returncode for compilation in compilations):
            errors = "\n".join(outputs)
            continue
        library = scratch / "kernels.so"
        linking = subprocess.run(
            [*command, "-shared", *map(str, objects), "-o", str(library), "-lm"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        if linking.returncode == 0:
            if errors:
                level = logging.INFO if flags else logging.WARNING  # for any CPU of this kind, not for this one
                used = shlex.join(flags) or "no flags for this CPU"
                logger.log(level, "The CPU kernels are compiled with %s, since others failed: %s", used, errors[:500])
            return library
        errors = linking.stderr
    raise CompilationError(f"{shlex.join(compiler)} failed on the CPU kernels:\n{errors[-2000:]}")


def _fingerprint(compiler: list[str], target_flags: tuple[tuple[str, ...], ...]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, stdin=subprocess.DEVNULL, text=True)
    parts = [
        shlex.join(compiler),
        version.stdout,
        repr((COMMON_FLAGS, target_flags)),
        _cpu_description(),
        *((SOURCE_FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _cpu_description() -> str:
    """Model and features of the CPU: a home folder may be shared by machines whose CPUs differ."""
    lines = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines += sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)})
    return "\n".join(lines)
