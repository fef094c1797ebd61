"""The least that a forward pass can take: its memory traffic or its arithmetic, whichever is more.

Launches and collectives between ranks come on top, as far as the device's `layer_overhead_s` says.
"""

from dataclasses import dataclass

from app.planning.device import Device
from app.planning.network_share import NetworkShare


@dataclass(frozen=True)
class PassCost:
    """Of one rank."""

    weight_bytes: float  # read
    kv_bytes: float  # read
    memory_s: float
    arithmetic_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.arithmetic_s) + self.overhead_s


def pass_cost(
    network: NetworkShare,
    device: Device,
    num_sequences: int,
    num_rows: float,  # over all sequences
    num_logits: float,  # rows of which logits are computed; 0: the head is not read
    context_len: int,
) -> PassCost:
    weight_bytes: float = network.body.num_bytes
    num_elements: float = network.body.num_elements
    if network.experts is not None:
        experts, routed = network.experts, network.routed
        weight_bytes += routed.num_bytes * experts.share_read(num_rows)
        num_elements += routed.num_elements * experts.num_per_token / experts.num_experts
    head_flops = 2 * num_logits * network.head.num_elements
    if num_logits:
        weight_bytes += network.head.num_bytes
    attended = [min(context_len, window or context_len) for window in network.windows]
    kv_bytes = num_sequences * sum(
        spec.token_bytes * length for spec, length in zip(network.kv_specs, attended, strict=True)
    )
    attention_flops = num_rows * network.attention_flops * sum(attended)
    return PassCost(
        weight_bytes,
        kv_bytes,
        memory_s=(weight_bytes + kv_bytes) / device.bandwidth,
        arithmetic_s=(2 * num_rows * num_elements + head_flops + attention_flops) / device.flops,
        overhead_s=len(network.windows) * device.layer_overhead_s,
    )
