"""What Ray Serve is to do with an application: the sections of its arguments that bear Serve's and Ray's names."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

AUTOSCALING_POLICY = "app.serve.autoscaling:policy"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


PlacementStrategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


class RayActorOptions(Section):
    """What Ray reserves for each rank. It reserves, and does not limit: the model's threads are `num_threads`."""

    num_cpus: float | None = Field(default=None, ge=0, description="Default: num_threads, or 1.")
    num_gpus: float | None = Field(default=None, ge=0, description="Default: one GPU where the device is cuda.")
    memory: int | None = Field(default=None, ge=1, description="Bytes.")
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None


class DraftActorOptions(Section):
    """What Ray reserves for the draft actor of a replica, in the bundle of rank 0."""

    num_cpus: float | None = Field(
        default=None, ge=0, description="Default: 1 for a draft model, whose threads they are; 0 for lookups."
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of rank 0's GPU: what is reserved there is divided between the two. "
        "Default: 0.1 for a draft model where rank 0 has a GPU.",
    )


class AutoscalingConfig(Section):
    """Ray Serve's options and the targets of our policy, `app/serve/autoscaling.py`: load of one replica each.

    The replicas that what is open takes up by requests, or by KV blocks and queued tokens, whichever is more.
    """

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=4, ge=1)
    initial_replicas: int | None = Field(default=None, ge=0)
    target_ongoing_requests: float | None = Field(
        default=None, gt=0, description="Default: max_num_seqs, so that batches are full before a replica is added."
    )
    target_queued_tokens: float | None = Field(
        default=None,
        gt=0,
        description="Tokens in the queues for each replica to add. Default: 4 x max_num_batched_tokens, the prompts of "
        "four full steps: what is queued below that is computed sooner than a replica can load.",
    )
    target_kv_usage: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of KV blocks at which a replica counts as full: near 1 sequences are preempted.",
    )
    upscale_delay_s: float = Field(default=30.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)
    look_back_period_s: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, above max_replicas, {self.max_replicas}: lower the first"
            )
        return self

    def serve_options(self) -> dict[str, Any]:
        """For `autoscaling_config` of Ray Serve, once all targets are known."""
        targets = {"target_queued_tokens", "target_kv_usage"}
        policy = {"policy_function": AUTOSCALING_POLICY, "policy_kwargs": self.model_dump(include=targets)}
        return {**self.model_dump(exclude_none=True, exclude=targets), "policy": policy}


class DeploymentConfig(Section):
    """Ray Serve's options of the replicas that hold the model, under Serve's names."""

    num_replicas: int | None = Field(default=None, ge=1, description="A fixed number, in place of autoscaling_config.")
    autoscaling_config: AutoscalingConfig | None = Field(default=None, description="Default: 1 to 4 replicas.")
    max_queued_requests: int | None = Field(
        default=None,
        ge=0,
        description="Sequences that may wait in a replica; more are refused. Default: 4 x max_num_seqs.",
    )
    max_ongoing_requests: int | None = Field(
        default=None, ge=1, description="Requests on their way to a replica. Default: twice what it can run and queue."
    )
    graceful_shutdown_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="How long a replica that is taken away may finish its answers; then they are cut. In a "
        "redeployment requests wait for the new replica so long: it should load sooner. Default: request_timeout_s.",
    )
    health_check_period_s: float = Field(default=2.0, gt=0, description="A lost rank is noticed so much later.")
    health_check_timeout_s: float = Field(default=30.0, gt=0)
    ray_actor_options: RayActorOptions = RayActorOptions()
    draft_actor_options: DraftActorOptions | None = Field(
        default=None, description="Of speculative_config.placement actor."
    )
    placement_group_strategy: PlacementStrategy = Field(
        default="PACK", description="How the ranks of a replica spread over nodes."
    )
    placement_group_bundles: list[dict[str, float]] | None = Field(
        default=None, description="What Ray reserves for each rank. Default: ray_actor_options, once a rank."
    )
    wait_for_nodes: bool = Field(
        default=False, description="The cluster will grow: do not refuse a replica that it can not hold yet."
    )

    @model_validator(mode="after")
    def _bundles_are_alike(self) -> Self:
        bundles = self.placement_group_bundles or []
        num_gpus = [bundle.get("GPU", 0) for bundle in bundles]
        if any(num_gpus) and not all(num_gpus):
            raise ValueError(
                f"placement_group_bundles is {bundles}, GPUs for some ranks and none for others: "
                "give every bundle a GPU, or none"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError(f"num_replicas is {self.num_replicas} beside an autoscaling_config: give one of them")
        return self


class IngressConfig(Section):
    """The processes that speak HTTP: they hold no model, and one is enough for several replicas."""

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.0, ge=0, description="What Ray reserves for each.")
    resources: dict[str, float] | None = Field(
        default=None,
        description="Further resources, to place them: beside the HTTP proxy they are lost with no other node.",
    )
