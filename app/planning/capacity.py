"""Memory of a rank: what weights, a step and KV take of it. Of ranks that differ, rank 0's, which has least room."""

from dataclasses import dataclass

from app.config import AppConfig
from app.engine.kv_cache import block_bytes
from app.engine.kv_sizing import StepShape, plan_num_blocks
from app.planning.device import GIB, Device
from app.planning.planned_drafter import PlannedDrafter, PlannedTarget


@dataclass(frozen=True)
class Capacity:
    """In bytes and tokens, of rank 0; every rank holds KV of the same tokens."""

    device_bytes: int
    runtime_bytes: int  # a draft actor's included
    weight_bytes: int  # drafter included
    activation_bytes: int  # of the largest step
    pool_bytes: int
    token_bytes: int  # KV of a token, drafter included
    pool_tokens: int
    room_tokens: int  # that kv_cache_memory could ask for

    @property
    def spare_bytes(self) -> int:
        """Left to the rest of the machine, or to later."""
        taken = self.runtime_bytes + self.weight_bytes + self.activation_bytes + self.pool_bytes
        return self.device_bytes - taken


def plan_capacity(
    config: AppConfig, max_model_len: int, target: PlannedTarget, drafter: PlannedDrafter | None, device: Device
) -> Capacity:
    """As the engine would size its pool.

    Raises ValueError where weights or KV do not fit.
    """
    specs = target.share.kv_specs + (drafter.kv_specs if drafter is not None else [])
    weight_bytes = target.share.weight_bytes + (drafter.weight_bytes if drafter is not None else 0)
    speculative, model_config = config.speculative_config, target.shape.config
    step = StepShape(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=speculative.draft_limit if speculative is not None else 0,
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        soft_drafts=drafter is not None and drafter.share is not None,
    )
    # A lookup takes nothing of a GPU; beside a rank on the CPU it is one more process.
    has_two_processes = drafter is not None and drafter.has_actor and (drafter.share is not None or not device.is_gpu)
    num_processes = 2 if has_two_processes else 1
    available = device.available_bytes(weight_bytes, num_processes)
    room = available - step.activation_bytes
    bytes_a_block = block_bytes(specs, config.block_size)
    if room < bytes_a_block:
        raise ValueError(
            f"tensor_parallel_size is {target.layout.num_ranks}: weights take {weight_bytes / GIB:.1f} GiB and a "
            f"step's tensors {step.activation_bytes / GIB:.1f}, which leaves no room for KV in {device.name}'s "
            f"{device.memory_bytes / GIB:.1f}: use more ranks, or devices with more memory"
        )
    asked = None if config.kv_cache_memory == "auto" else config.kv_cache_memory
    num_blocks = plan_num_blocks(asked, available, bytes_a_block, config.block_size, step)
    return Capacity(
        device_bytes=device.memory_bytes,
        runtime_bytes=num_processes * device.runtime_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=step.activation_bytes,
        pool_bytes=num_blocks * bytes_a_block,
        token_bytes=sum(spec.token_bytes for spec in specs),
        pool_tokens=num_blocks * config.block_size,
        room_tokens=room // bytes_a_block * config.block_size,
    )
