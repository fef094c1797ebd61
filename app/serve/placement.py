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

    Raises ValueError where that is given, and a bundle is too small for what is to be in it.
    """
    given, size = config.deployment_config.placement_group_bundles, config.tensor_parallel_size
    if given is None:
        return [_needed_in_bundle(config, index, has_gpus) for index in range(size)]
    for index, bundle in enumerate(given):
        needed, has_drafter = _needed_in_bundle(config, index, "GPU" in bundle), config.has_draft_actor and index == 0
        if not _fits(needed, bundle):
            raise ValueError(
                f"deployment_config.placement_group_bundles[{index}] is {describe(bundle)}, and "
                f"{'rank 0 and its draft actor ask' if has_drafter else 'a rank asks'} for {describe(needed)}: raise "
                f"the first, or lower ray_actor_options{' and draft_actor_options' * has_drafter}"
            )
    return given


def _needed_in_bundle(config: AppConfig, index: int, has_gpus: bool) -> Resources:
    """The first is rank 0's, which is where a draft actor goes."""
    options = rank_options(config, has_gpus)
    if index == 0 and config.has_draft_actor:
        options["num_cpus"] += draft_actor_options(config, has_gpus)["num_cpus"]
    return bundle_of(options)


def bundle_of(options: dict[str, Any]) -> Resources:
    """What an actor of these options takes."""
    bundle = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), "memory": options.get("memory", 0)}
    bundle |= options.get("resources", {})
    if "accelerator_type" in options:
        bundle[f"accelerator_type:{options['accelerator_type']}"] = 0.001  # as Ray marks the nodes that have it
    return {name: float(amount) for name, amount in bundle.items() if amount}


def check_placeable(
    bundles: Sequence[Resources], strategy: str, nodes: Sequence[Resources], num_replicas: int = 1
) -> None:
    """Raises ValueError, saying what is missing, where `nodes` with nothing on them could not hold the replicas."""
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
    short = missing(bundles, strategy, nodes, num_replicas)
    if short:
        raise ValueError(
            f"deployment_config asks for {num_replicas} replicas, and the cluster can not hold them: {short}; lower "
            "num_replicas or autoscaling_config.min_replicas, add nodes, or set wait_for_nodes where they are on their "
            "way"
        )


def missing(bundles: Sequence[Resources], strategy: str, nodes: Sequence[Resources], num_replicas: int = 1) -> str:
    """What the nodes lack to hold the bundles of every replica, in words; empty where they lack nothing.

    Of each replica the largest bundle comes first, and goes to the node where it leaves the least.
    """
    if strategy == "STRICT_PACK":
        bundles = [{name: sum(b.get(name, 0) for b in bundles) for name in {name for b in bundles for name in b}}]
    free, num_placed = [dict(node) for node in nodes], 0
    unplaced = None
    for _ in range(num_replicas):
        used: set[int] = set()
        for bundle in sorted(bundles, key=_size, reverse=True):
            fitting = [i for i, node in enumerate(free) if i not in used and _fits(bundle, node)]
            if not fitting:
                unplaced = unplaced or bundle
                continue
            num_placed += 1
            tightest = min(fitting, key=lambda i: _size(free[i]))
            for name, amount in bundle.items():
                free[tightest][name] -= amount
            if strategy == "STRICT_SPREAD":
                used.add(tightest)
    if unplaced is None:
        return ""
    wanted = {"STRICT_PACK": " on one node", "STRICT_SPREAD": ", each on a node of its own"}.get(strategy, "")
    return (
        f"{f'{num_replicas} x ' * (num_replicas > 1)}{len(bundles)} bundle{'s' * (len(bundles) > 1)} of "
        f"{describe(unplaced)}{wanted} {'are' if num_replicas * len(bundles) > 1 else 'is'} needed, and {len(nodes)} "
        f"node{'s' * (len(nodes) != 1)} with {'; '.join(describe(node) for node in nodes) or 'nothing'} hold "
        f"{num_placed}"
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


def _size(resources: Resources) -> tuple[float, float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0), resources.get("memory", 0)
