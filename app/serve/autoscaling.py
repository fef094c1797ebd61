"""How many replicas the load needs: by what they hold and what waits, not by the number of requests alone.

Serve pickles this module into its controller, which has none of our packages: it imports the standard library only.
Serve itself keeps the count within its bounds, and holds a change back for `upscale_delay_s` or `downscale_delay_s`.
"""

import math
from collections.abc import Mapping
from typing import Any

TOLERANCE = 0.1
"""Of capacity: so far the load may pass it, or must lie below that of fewer replicas, before the count changes."""


def load_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """What a replica tells the policy, from its engine's stats; nothing before it knows."""
    if not stats:
        return {}
    return {"queued_tokens": float(stats["num_waiting_tokens"]), "kv_usage": float(stats["kv_usage"])}


class LoadPolicy:
    """The smallest number of replicas that would hold what runs and take in what waits.

    A replica is full at `target_kv_usage` of its KV blocks, and each `target_queued_tokens` in the queues call for
    one more. Where answers are short the slots run out before the blocks, so the requests that are open, over
    Serve's `target_ongoing_requests`, count as well: the larger number stands.
    """

    def __init__(self, target_queued_tokens: float = 8192, target_kv_usage: float = 0.8) -> None:
        self._target_queued_tokens = target_queued_tokens
        self._target_kv_usage = target_kv_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Of Serve's AutoscalingContext; keeps no state of its own."""
        target = context.target_num_replicas
        load = self._load(context)
        at_least = math.ceil(load / (1 + TOLERANCE))
        at_most = math.ceil(load / (1 - TOLERANCE))
        if self._is_settled(context):
            return min(max(target, at_least), at_most), {}
        return max(target, at_least), {}

    def _load(self, context: Any) -> float:
        """In full replicas."""
        reported = context.aggregated_metrics or {}
        held = sum(reported.get("kv_usage", {}).values()) / self._target_kv_usage
        queued = sum(reported.get("queued_tokens", {}).values()) / self._target_queued_tokens
        # While replicas that were asked for load their model, the queue grows, and does not say how many more are due.
        is_growing = context.current_num_replicas < context.target_num_replicas
        requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        return max(requests, held + (0.0 if is_growing else queued))

    def _is_settled(self, context: Any) -> bool:
        """Whether the load is known well enough to take a replica away: all are there, and have reported."""
        reported = (context.aggregated_metrics or {}).get("kv_usage", {})
        running = context.running_replicas
        return len(running) == context.target_num_replicas and all(replica in reported for replica in running)


policy = LoadPolicy
