"""Where the ranks of a replica go: one bundle of resources each, and whether a cluster can hold them."""

from collections.abc import Sequence
from typing import Any

from app.config import AppConfig

Resources = dict[str, float]

DRAFTER_GPU_SHARE = 0.1
"""Of rank 0's GPU, as Ray counts it: Ray limits nobody, and the KV pool leaves room for what a drafter has loaded."""


def rank_options(config: AppConfig, has_gpus: bool) -> dict[str, Any]:
    """Ray's options of the actor that runs one rank; with one rank that is the replica itself."""
    options = config.deployment_config.ray_actor_options.model_dump(exclude_none=True)
    options.setdefault("num_cpus", config.num_threads or 1)
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        options.setdefault("num_gpus", 1)
    return options


def draft_actor_options(config: AppConfig, has_gpus: bool) -> dict[str, Any]:
    """Ray's options of the draft actor, which shares the bundle of rank 0, and its GPU."""
    assert config.speculative_config is not None
    given, has_network = config.deployment_config.draft_actor_options, config.speculative_config.has_network
    options: dict[str, Any] = given.model_dump(exclude_none=True) if given is not None else {}
    options.setdefault("num_cpus", 1 if has_network else 0)
    has_share = has_network and rank_options(config, has_gpus).get("num_gpus", 0) > 0
    options.setdefault("num_gpus", DRAFTER_GPU_SHARE if has_share else 0)
    runtime_env = config.deployment_config.ray_actor_options.runtime_env
    return {**options, **({"runtime_env": runtime_env} if runtime_env else {})}


def first_rank_options(config: AppConfig, has_gpus: bool) -> dict[str, Any]:
    """Ray's options of rank 0, with what it leaves of its GPU to a draft actor.

    Raises ValueError where that is nothing.
    """
    options = rank_options(config, has_gpus)
    if not config.has_draft_actor:
        return options
    num_gpus, share = options.get("num_gpus", 0), draft_actor_options(config, has_gpus)["num_gpus"]
    if share and share >= num_gpus:
        raise ValueError(
            f"deployment_config.draft_actor_options.num_gpus is {share:g}, and rank 0 has {num_gpus:g} GPU to share "
            "with it: lower the first"
        )
    return {**options, **({"num_gpus": num_gpus - share} if share else {})}


def rank_bundles(config: AppConfig, has_gpus: bool) -> list[Resources]:
    """The placement group of a replica with several processes, rank 0's bundle first.

    Raises ValueError where that is given, and too small for the draft actor that is to be in it.
    """
    given, rank = config.deployment_config.placement_group_bundles, rank_options(config, has_gpus)
    if not config.has_draft_actor:
        return given if given is not None else [bundle_of(rank)] * config.tensor_parallel_size
    num_cpus = rank["num_cpus"] + draft_actor_options(config, has_gpus)["num_cpus"]
    if given is not None:
        if given[0].get("CPU", 0) < num_cpus:
            raise ValueError(
                f"deployment_config.placement_group_bundles begins with {describe(given[0])}, and rank 0 and its draft "
                f"actor ask for {num_cpus:g} CPU: raise the first, or lower ray_actor_options and draft_actor_options"
            )
        return given
    return [bundle_of({**rank, "num_cpus": num_cpus}), *[bundle_of(rank)] * (config.tensor_parallel_size - 1)]


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
    if short and len(bundles) == 1:
        raise ValueError(
            f"the cluster can not hold rank 0 and its draft actor: {short}; lower deployment_config.ray_actor_options "
            "or draft_actor_options, add nodes, or set wait_for_nodes where they are on their way"
        )
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
