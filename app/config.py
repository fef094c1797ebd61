"""The arguments of the application: the engine's configuration and what Ray Serve is to do with it."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from app.config_errors import describe
from app.deployment_config import AutoscalingConfig, DeploymentConfig, IngressConfig, Section
from app.engine_config import EngineConfig

REPOSITORY = Path(__file__).resolve().parent.parent


class UserConfig(Section):
    """What may be changed while serving, through the deployment's `user_config`."""

    num_speculative_tokens: int | None = Field(
        default=None, ge=0, description="Drafts a sequence and step, at most; 0 turns drafting off."
    )

    @classmethod
    def parse(cls, value: Any) -> "UserConfig":
        """Raises ValueError of one line that names the field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ValueError(describe(error, cls, value, "user_config")) from None


class AppConfig(EngineConfig):
    """`applications[].args` of a Serve file: the engine's fields, and those below."""

    served_model_name: str | None = Field(default=None, min_length=1, description="Default: the last part of `model`.")
    step_timeout_s: float = Field(
        default=60.0, gt=0, description="A replica whose step takes longer is unhealthy, and is replaced."
    )
    boot_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Ranks that have not met by then are given up. Loading takes the time it takes.",
    )
    retry_limit_s: float = Field(
        default=120.0,
        ge=0,
        description="How long a request whose replica was lost, and of which nothing has been passed on, waits for "
        "another before it fails.",
    )
    request_timeout_s: float = Field(
        default=1800.0, gt=0, description="A request that runs longer is ended with an error: nobody may be listening."
    )
    log_stats_interval_s: float = Field(
        default=10.0, ge=0, description="A line on throughput, queues and drafts in the replica's log; 0: none."
    )
    deployment_config: DeploymentConfig = DeploymentConfig()
    ingress_config: IngressConfig = IngressConfig()

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Ray Serve calls this with the file's `args`.

        Raises ValueError of one line that names each wrong field by its path in the file, in place of
        pydantic's report.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise ValueError(describe(error, cls, obj, "args")) from None

    @model_validator(mode="after")
    def _a_bundle_a_rank(self) -> Self:
        bundles, size = self.deployment_config.placement_group_bundles, self.tensor_parallel_size
        if bundles is not None and size == 1 and not self.has_draft_actor:
            raise ValueError(
                f"deployment_config.placement_group_bundles is {bundles}, and one rank without a draft actor has no "
                "placement group: leave it out, and use ray_actor_options"
            )
        if bundles is not None and len(bundles) != size:
            raise ValueError(
                f"deployment_config.placement_group_bundles is {len(bundles)} bundles long, and tensor_parallel_size "
                f"{size}: give one a rank"
            )
        return self

    @model_validator(mode="after")
    def _draft_actors_have_options(self) -> Self:
        if self.deployment_config.draft_actor_options is not None and not self.has_draft_actor:
            raise ValueError(
                "deployment_config.draft_actor_options is given, and no draft actor: leave it out, or set "
                "speculative_config.placement to actor"
            )
        return self

    @model_validator(mode="after")
    def _drafts_are_given_up_before_the_step(self) -> Self:
        speculative = self.speculative_config
        if speculative is not None and self.has_draft_actor and speculative.draft_timeout_s >= self.step_timeout_s:
            raise ValueError(
                f"speculative_config.draft_timeout_s is {speculative.draft_timeout_s:g}, and step_timeout_s "
                f"{self.step_timeout_s:g}: a late draft must end before its step is given up; lower the first"
            )
        return self

    @model_validator(mode="after")
    def _find_checkpoints(self) -> Self:
        self.model = _find_checkpoint("model", self.model)
        speculative = self.speculative_config
        if speculative is not None and speculative.method == "draft_model":
            speculative.model = _find_checkpoint("speculative_config.model", speculative.model)
        _check_against_checkpoint(Path(self.model), self.max_model_len, self.tensor_parallel_size)
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf")

    @property
    def has_draft_actor(self) -> bool:
        return self.speculative_config is not None and self.speculative_config.placement == "actor"

    @property
    def max_queued_requests(self) -> int:
        limit = self.deployment_config.max_queued_requests
        return 4 * self.max_num_seqs if limit is None else limit

    @property
    def max_ongoing_requests(self) -> int:
        # A replica itself refuses what exceeds its queue, counting sequences. Serve's limit, which counts
        # requests, lies above: a request that Serve held back would wait where nothing schedules it.
        return self.deployment_config.max_ongoing_requests or 2 * (self.max_num_seqs + self.max_queued_requests)

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        return self.deployment_config.graceful_shutdown_timeout_s or self.request_timeout_s

    @property
    def autoscaling_config(self) -> AutoscalingConfig:
        """With its defaults filled in; where `num_replicas` is given it has no say."""
        given = self.deployment_config.autoscaling_config or AutoscalingConfig()
        targets = {
            "target_ongoing_requests": given.target_ongoing_requests or float(self.max_num_seqs),
            "target_queued_tokens": given.target_queued_tokens or 4.0 * self.max_num_batched_tokens,
        }
        return given.model_copy(update=targets)

    def check_user_config(self, user_config: UserConfig) -> None:
        """Raises ValueError for a draft length that this engine is not built for."""
        num = user_config.num_speculative_tokens
        limit = self.speculative_config.draft_limit if self.speculative_config else 0
        if num is not None and num > limit:
            raise ValueError(
                f"user_config.num_speculative_tokens is {num}: use at most {limit}, "
                "speculative_config.num_speculative_tokens, which sizes were chosen for"
            )


def _find_checkpoint(name: str, model: str) -> str:
    """A folder or file by its absolute path, since actors run elsewhere; a hub id as it is.

    Relative paths start at the current folder, then at the repository's root.
    """
    path = Path(model).expanduser()
    for candidate in (Path.cwd() / path, REPOSITORY / path):
        if candidate.is_file() or (candidate / "config.json").is_file():
            return str(candidate)
        if candidate.is_dir() and model.count("/") != 1:
            raise ValueError(f"{name} is {model!r}: the folder has no config.json, so it is no checkpoint")
    if model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise ValueError(f"{name} is {model!r}: there is no such folder or file; give a checkpoint's, or a hub id")
    return model


def _check_against_checkpoint(folder: Path, max_model_len: int | None, tensor_parallel_size: int) -> None:
    """As the engine's own checks, but before Ray starts anything."""
    path = folder / "config.json"
    if not path.is_file():
        return
    checkpoint = json.loads(path.read_text())
    limit = checkpoint.get("max_position_embeddings")
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len is {max_model_len}, above the checkpoint's max_position_embeddings, {limit}: lower it"
        )
    for name in ("num_attention_heads", "vocab_size"):
        if checkpoint.get(name, 0) % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel_size}, which does not divide the checkpoint's {name}, "
                f"{checkpoint[name]}: use a divisor"
            )
