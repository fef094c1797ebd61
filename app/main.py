"""The entry point of a Serve file: `import_path: app.main:build`."""

# `from __future__ import annotations` must not be used here: Ray Serve reads the annotation of `build` to parse `args`.
from typing import Any

import ray
from ray import serve

from app.config import AppConfig
from app.serve.ingress import Ingress
from app.serve.placement import check_placeable, first_rank_options, rank_bundles, rank_options
from app.serve.target_replica import TargetReplica

MAX_LOAD_ATTEMPTS = 2
DRAIN_POLL_S = 0.2
"""How often a replica that is taken away looks whether its last answer is out; Serve's 2 s make Ctrl-C slow."""


def build(args: AppConfig) -> serve.Application:
    """HTTP in front, replicas with the model behind."""
    target = serve.deployment(**_target_options(args))(TargetReplica).bind(args)
    return serve.deployment(**_ingress_options(args))(Ingress).bind(target, args)


def _ingress_options(args: AppConfig) -> dict[str, Any]:
    ingress = args.ingress_config
    return {
        "num_replicas": ingress.num_replicas,
        # Above what all replicas take: the answer to overload is the replicas' to give, in OpenAI's form.
        "max_ongoing_requests": 2 * args.max_ongoing_requests * _max_replicas(args),
        "graceful_shutdown_timeout_s": args.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
        "ray_actor_options": ingress.model_dump(include={"num_cpus", "resources"}, exclude_none=True),
    }


def _target_options(args: AppConfig) -> dict[str, Any]:
    deployment = args.deployment_config
    options: dict[str, Any] = {
        "max_ongoing_requests": args.max_ongoing_requests,
        "max_queued_requests": args.max_ongoing_requests,
        "graceful_shutdown_timeout_s": args.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
        "health_check_period_s": deployment.health_check_period_s,
        "health_check_timeout_s": deployment.health_check_timeout_s,
        "max_constructor_retry_count": MAX_LOAD_ATTEMPTS,
        **_placement(args),
    }
    if deployment.num_replicas is not None:
        options["num_replicas"] = deployment.num_replicas
    else:
        options["autoscaling_config"] = args.autoscaling_config.serve_options()
    return options


def _placement(args: AppConfig) -> dict[str, Any]:
    """What Ray reserves for a replica; with several ranks a bundle each, and the replica itself sits in the first.

    One rank is the replica itself; a draft actor beside it takes a part of the one bundle.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    has_gpus = any(node.get("GPU", 0) > 0 for node in nodes)
    if args.tensor_parallel_size == 1 and not args.has_draft_actor:
        return {"ray_actor_options": rank_options(args, has_gpus)}
    bundles, strategy = rank_bundles(args, has_gpus), args.deployment_config.placement_group_strategy
    if nodes and not args.deployment_config.wait_for_nodes:
        check_placeable(bundles, strategy, nodes, _least_replicas(args))
    runtime_env = args.deployment_config.ray_actor_options.runtime_env
    replica = {"num_cpus": 0, **({"runtime_env": runtime_env} if runtime_env else {})}
    if args.tensor_parallel_size == 1:
        replica = first_rank_options(args, has_gpus)
    return {
        "ray_actor_options": replica,
        "placement_group_bundles": bundles,
        "placement_group_strategy": strategy,
    }


def _least_replicas(args: AppConfig) -> int:
    return args.deployment_config.num_replicas or max(args.autoscaling_config.min_replicas, 1)


def _max_replicas(args: AppConfig) -> int:
    return args.deployment_config.num_replicas or args.autoscaling_config.max_replicas
