"""A line in the replica's log, now and then: what the engine has done since the last one."""

import logging

from app.serve.metric import Stats

logger = logging.getLogger("ray.serve")

FEWEST_DECISIONS = 20
"""Of the draft length, for what they gained to be told: few steps, as when a replica warms up, say nothing of it."""


def log_activity(stats: Stats, since: Stats, period_s: float) -> None:
    """Says nothing where there was nothing to do."""
    if since["num_steps"] or stats["num_waiting"]:
        logger.info("%s", describe_activity(stats, since, period_s))


def describe_activity(stats: Stats, since: Stats, period_s: float) -> str:
    """Of the engine's stats and what they rose by over `period_s`."""
    parts = [
        f"{since['num_prompt_tokens'] / period_s:.1f} prompt and "
        f"{since['num_generated_tokens'] / period_s:.1f} generated tokens/s",
        f"{stats['num_running']} running, {stats['num_waiting']} waiting",
        f"KV {stats['kv_usage']:.1%} used",
    ]
    if since["num_prefix_queried_tokens"]:
        parts.append(f"prefix hits {since['num_prefix_hit_tokens'] / since['num_prefix_queried_tokens']:.1%}")
    parts.extend(_speculation(stats, since))
    return "; ".join(parts)


def _speculation(stats: Stats, since: Stats) -> list[str]:
    """Nothing where drafting is off, or no sequence has gone on."""
    num_steps = since["num_verifications"]
    if not num_steps or not (stats["num_speculative_tokens"] or since["num_drafted"]):
        return []
    pairs = zip(since["accepted_per_position"], since["drafted_per_position"], strict=True)
    rates = " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in pairs if drafted)
    parts = [
        f"{since['num_drafted'] / num_steps:.2f} drafts a sequence and step, at most {stats['num_speculative_tokens']}",
        f"accepted by position {rates or '-'}",
        f"mean acceptance length {(since['num_accepted'] + num_steps) / num_steps:.2f}",
    ]
    num_decisions = since.get("controller_num_decisions", 0)
    if num_decisions:
        parts.append(f"drafts in {1 - since['controller_num_plain'] / num_decisions:.0%} of steps")
    plain_tokens = since.get("controller_plain_tokens")
    if plain_tokens and num_decisions >= FEWEST_DECISIONS:
        emitted, predicted = since["controller_emitted_tokens"], since["controller_predicted_tokens"]
        parts.append(f"{emitted / plain_tokens:.2f} x plain, {predicted / plain_tokens:.2f} predicted")
    if stats["num_drafter_faults"]:
        parts.append(f"drafter faults {stats['num_drafter_faults']}, {since['num_drafter_faults']} of them new")
    return parts
