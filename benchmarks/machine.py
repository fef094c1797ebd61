"""What a figure was measured on, and what that machine can do at best."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
READ_BUFFER_BYTES = 512 * 2**20  # beyond any cache


@dataclass(frozen=True)
class Machine:
    """The hardware and software behind a figure."""

    cpu: str
    num_cores: int
    memory_bytes: int
    gpu: str | None
    python: str
    torch: str
    commit: str  # with "+changes" where the working tree differs

    def __str__(self) -> str:
        gpu = f"{self.gpu}, " if self.gpu else ""
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        return f"{gpu}{self.cpu}, {self.num_cores} cores, {memory}, python {self.python}, torch {self.torch}"


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        torch=torch.__version__,
        commit=_commit(),
    )


def _cpu_name() -> str:
    """Model, and the instruction sets that decide about bf16."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    name = fields.get("model name", platform.machine())
    return f"{name} ({', '.join(features)})" if features else name


def _commit() -> str:
    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
        return run.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def read_bandwidth(device: torch.device, num_repeats: int = 8, num_bytes: int = READ_BUFFER_BYTES) -> float:
    """Bytes a second at which all threads (or the GPU) read a buffer beyond the caches; the best of several passes."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)
    return buffer.nbytes / min(call_times(lambda: buffer.amax(), device, num_repeats))


def call_times(call: Callable[[], object], device: torch.device, num_repeats: int) -> list[float]:
    """Seconds of each of `num_repeats` calls, after one that is not counted."""
    times = []
    for _ in range(num_repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process and its descendants, in bytes."""

    num_processes: int
    peak_rss_bytes: int  # sum of each one's peak: pages that they share count more than once
    largest_peak_rss_bytes: int  # of the one process that took most
    pss_bytes: int  # now, shared pages divided among those that share them


def process_tree_memory(pid: int) -> ProcessMemory:
    """Raises ValueError where there is no such process, or no /proc."""
    if not Path(f"/proc/{pid}/status").exists():
        raise ValueError(f"--pid is {pid}: there is no such process under /proc")
    pids = process_tree(pid)
    peaks = [_proc_kib(f"/proc/{p}/status", "VmHWM") for p in pids]
    shares = [_proc_kib(f"/proc/{p}/smaps_rollup", "Pss") for p in pids]
    return ProcessMemory(len(pids), 1024 * sum(peaks), 1024 * max(peaks), 1024 * sum(shares))


def process_tree(pid: int) -> list[int]:
    """`pid` and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:  # it has just ended
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    tree = [pid]
    for member in tree:
        tree.extend(children.get(member, []))
    return tree


def _proc_kib(path: str, field: str) -> int:
    """A field of a /proc file; 0 for a process that has ended or is not ours to read."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)
