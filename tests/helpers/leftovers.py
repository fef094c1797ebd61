"""What processes may leave behind on a machine, told apart from what others are doing there."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LISTENING = "0A"  # as /proc/net/tcp has it


def shared_memory() -> set[str]:
    """Entries of /dev/shm by name."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def abandoned_shared_memory(since: set[str]) -> set[str]:
    """Entries that were not there, and that no process uses."""
    new = shared_memory() - since
    pids = [folder.name for folder in Path("/proc").iterdir() if folder.name.isdecimal()] if new else []
    return new - {Path(name).name for pid in pids for name in _files_of(pid) if name.startswith(f"{SHARED_MEMORY}/")}


def listening_sockets() -> set[int]:
    """Inodes of the TCP sockets that listen, whosever they are."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(fields[9]) for fields in lines if fields[3] == LISTENING}


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Inodes of all sockets of processes."""
    links = [name for pid in pids for name in _files_of(str(pid))]
    return {int(name.removeprefix("socket:[").rstrip("]")) for name in links if name.startswith("socket:[")}


def _files_of(pid: str) -> Iterator[str]:
    """Open and mapped; none of a process that is gone, or not ours to look at."""
    folder = Path("/proc") / pid
    try:
        yield from [os.readlink(link) for link in (folder / "fd").iterdir()]
        yield from [fields[5] for line in (folder / "maps").read_text().splitlines() if len(fields := line.split()) > 5]
    except OSError:
        return
