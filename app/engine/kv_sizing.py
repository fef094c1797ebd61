"""How many KV blocks fit, and whether what was asked for fits."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_SHARE = 0.5  # of the memory still available: the rest of the machine is not ours
CUDA_SHARE = 0.9


@dataclass(frozen=True)
class StepShape:
    """The largest step, for the memory it needs beside weights and KV."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_speculative_tokens: int  # 0: plain decoding
    vocab_size: int
    hidden_size: int
    soft_drafts: bool  # the drafter keeps a distribution a draft

    @property
    def activation_bytes(self) -> int:
        """Logits of a full verification in fp32 with their working copies, soft drafts, and hidden states."""
        logits = 4 * self.max_num_seqs * (1 + self.num_speculative_tokens) * self.vocab_size
        draft_probs = 4 * self.max_num_seqs * self.num_speculative_tokens * self.vocab_size if self.soft_drafts else 0
        hidden = 4 * self.max_num_batched_tokens * self.hidden_size
        return 3 * logits + 2 * draft_probs + 8 * hidden


def plan_num_blocks(
    kv_cache_memory: int | None,  # bytes; None: as many as every sequence at full length needs, where they fit
    available_bytes: int,  # free for KV and activations, after the weights
    block_bytes: int,
    block_size: int,
    shape: StepShape,
) -> int:
    """Blocks of the pool.

    Raises ValueError where not even one sequence of `max_model_len` fits.
    """
    if kv_cache_memory is None:
        wanted = shape.max_num_seqs * -(-shape.max_model_len // block_size) * block_bytes
        room = min(wanted, available_bytes - shape.activation_bytes)
        source = f"{_mib(available_bytes)} free, less {_mib(shape.activation_bytes)} for a step"
    else:
        room = kv_cache_memory
        source = f"kv_cache_memory is {_mib(kv_cache_memory)}"
        if kv_cache_memory > available_bytes:
            raise ValueError(f"{source}, but only {_mib(available_bytes)} are free: lower it")
    num_blocks = max(room, 0) // block_bytes
    if num_blocks * block_size < shape.max_model_len:
        needed = -(-shape.max_model_len // block_size) * block_bytes
        remedy = f"lower max_model_len to {num_blocks * block_size}" if num_blocks else "free memory"
        if kv_cache_memory is not None:
            remedy = f"raise kv_cache_memory or {remedy}" if num_blocks else "raise kv_cache_memory"
        raise ValueError(
            f"max_model_len is {shape.max_model_len}, which needs {_mib(needed)} of KV a sequence ({source}): {remedy}"
        )
    return num_blocks


def available_memory(device: torch.device, num_ranks_on_host: int = 1) -> int:
    """Bytes that a KV pool may take on `device`, now that the weights are there. Ranks share the host's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - CUDA_SHARE) * total), 0)
    return int(CPU_SHARE * _available_host_memory() / num_ranks_on_host)


def _available_host_memory() -> int:
    meminfo = Path("/proc/meminfo")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(int(text) - int(used.read_text()), 0))
    return available


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
