"""Where the ranks of a replica go: one bundle of resources each, and whether a cluster can hold them."""

from collections.abc import Sequence
from typing import Any

from app.config import AppConfig

Resources = dict[str, float]


def rank_options(config: AppConfig, has_gpus: bool) -> dict[str, Any]:
    """Ray's options of the actor that runs one rank; with one rank that is the replica itself."""
    options = config.deployment_config.ray_actor_options.model_dump(exclude_none=True)
    options.setdefault("num_cpus", config.num_threads or 1)
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        options.setdefault("num_gpus", 1)
    return options


def rank_bundles(config: AppConfig, has_gpus: bool) -> list[Resources]:
    """The placement group of a replica with several ranks, rank 0's bundle first."""
    given = config.deployment_config.placement_group_bundles
    return given if given is not None else [bundle_of(rank_options(config, has_gpus))] * config.tensor_parallel_size


def bundle_of(options: dict[str, Any]) -> Resources:
    """What an actor of these options takes."""
    bundle = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), "memory": options.get("memory", 0)}
    bundle |= options.get("resources", {})
    if "accelerator_type" in options:
        bundle[f"accelerator_type:{options['accelerator_type']}"] = 0.001  # as Ray marks the nodes that have it
    return {name: float(amount) for name, amount in bundle.items() if amount}


def check_placeable(bundles: Sequence[Resources], strategy: str, nodes: Sequence[Resources]) -> None:
    """Raises ValueError, saying what is missing, where `nodes` could not hold the bundles even with nothing on them."""
    short = missing(bundles, strategy, nodes)
    if short:
        raise ValueError(
            f"tensor_parallel_size is {len(bundles)}, and the cluster can not hold its ranks: {short}; lower it, add "
            "nodes, or set deployment_config.wait_for_nodes where they are on their way"
        )


def missing(bundles: Sequence[Resources], strategy: str, nodes: Sequence[Resources]) -> str:
    """What the nodes lack to hold the bundles, in words; empty where they lack nothing.

    Bundles are put where they fit first, as Ray does for those that are alike.
    """
    if strategy == "STRICT_PACK":
        bundles = [{name: sum(b.get(name, 0) for b in bundles) for name in {name for b in bundles for name in b}}]
    free, num_placed = [dict(node) for node in nodes], 0
    unplaced = None
    for bundle in bundles:
        node = next((node for node in free if _fits(bundle, node)), None)
        if node is None:
            unplaced = unplaced or bundle
            continue
        num_placed += 1
        for name, amount in bundle.items():
            node[name] -= amount
        if strategy == "STRICT_SPREAD":
            free.remove(node)
    if unplaced is None:
        return ""
    wanted = {"STRICT_PACK": " on one node", "STRICT_SPREAD": ", each on a node of its own"}.get(strategy, "")
    return (
        f"{len(bundles)} bundle{'s' * (len(bundles) > 1)} of {describe(unplaced)}{wanted} "
        f"{'are' if len(bundles) > 1 else 'is'} needed, and {len(nodes)} node{'s' * (len(nodes) != 1)} with "
        f"{'; '.join(describe(node) for node in nodes) or 'nothing'} hold {num_placed}"
    )


def describe(resources: Resources) -> str:
    """CPUs, GPUs and what else there is of a kind that bundles may ask for."""
    shown = {name: amount for name, amount in resources.items() if amount and not name.startswith(("node:", "object_"))}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"


def order_of_ranks(node_of_bundle: Sequence[str], first_node: str) -> list[int]:
    """Bundles by rank: those of the replica's own node first, then node by node, so that neighbours share one."""
    nodes = list(dict.fromkeys([first_node, *node_of_bundle]))
    return sorted(range(len(node_of_bundle)), key=lambda bundle: (nodes.index(node_of_bundle[bundle]), bundle))


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())
