"""What each way of drafting holds on a rank, and which passes its drafts take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.planning.checkpoint_shape import CheckpointShape, read_checkpoint_shape
from app.planning.device import Device
from app.planning.network_share import Layout, NetworkShare, mtp_share, target_share
from app.planning.pass_cost import PassCost, pass_cost
from app.speculative.config import DraftModelConfig, MTPConfig
from models.drafters.deepseek_mtp import FAMILIES
from models.kv_spec import LayerKVSpec


@dataclass(frozen=True)
class PlannedTarget:
    shape: CheckpointShape
    layout: Layout
    share: NetworkShare


@dataclass(frozen=True)
class PlannedDrafter:
    """`share` is one of `num_networks` alike; without one, drafts are looked up and as good as free."""

    name: str  # of its part of the weights
    share: NetworkShare | None = None
    num_networks: int = 1
    sees_hidden_states: bool = False  # of the target, so that it runs over every row that is kept
    is_shared: bool = False  # every rank of the target holds a share; else rank 0, or an actor beside it, the whole
    has_actor: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.share.weight_bytes * self.num_networks if self.share is not None else 0

    @property
    def expanded_bytes(self) -> int:
        return self.share.expanded_bytes * self.num_networks if self.share is not None else 0

    @property
    def kv_specs(self) -> list[LayerKVSpec]:
        return self.share.kv_specs * self.num_networks if self.share is not None else []

    def passes(
        self,
        device: Device,
        num_sequences: int,
        acceptance: list[float],  # of each draft, all before it included
        context_len: int,
    ) -> list[PassCost]:
        """Of one step: the tokens of the step before, then a row a sequence for each draft after the first."""
        if self.share is None or not acceptance:
            return []
        # A draft model has seen the drafts it made, but for the last.
        new_rows = 1 + (sum(acceptance) if self.sees_hidden_states else acceptance[-1])
        rows = [num_sequences * new_rows] * self.num_networks + [num_sequences] * (len(acceptance) - 1)
        logits = [num_sequences] + [0] * (self.num_networks - 1) + [num_sequences] * (len(acceptance) - 1)
        return [
            pass_cost(self.share, device, num_sequences, num_rows, num_logits, context_len)
            for num_rows, num_logits in zip(rows, logits, strict=True)
        ]


def _lookup(config: Any, target: PlannedTarget) -> PlannedDrafter:
    return PlannedDrafter("lookup", has_actor=config.placement == "actor")


def _mtp(config: MTPConfig, target: PlannedTarget) -> PlannedDrafter:
    model_config = target.shape.config
    if model_config.architecture not in FAMILIES or not model_config.num_nextn_predict_layers:
        raise ValueError(
            f"speculative_config.method is mtp, and config.json describes no MTP module (architectures "
            f"{model_config.architecture}, num_nextn_predict_layers {model_config.num_nextn_predict_layers}): "
            f"use a checkpoint of {', '.join(FAMILIES)} that has some, or another method"
        )
    share = mtp_share(target.shape, target.layout, target.share)
    num_modules = model_config.num_nextn_predict_layers
    return PlannedDrafter("MTP", share, num_modules, sees_hidden_states=True, is_shared=True)


def _draft_model(config: DraftModelConfig, target: PlannedTarget) -> PlannedDrafter:
    """In the target's dtype; a share on each of its ranks, or the whole on the first or beside it."""
    served = str(target.shape.config.dtype).removeprefix("torch.")
    shape = read_checkpoint_shape(config.model, served)
    is_shared = config.shares_drafter(target.layout.num_ranks)
    num_ranks = target.layout.num_ranks if is_shared else 1
    try:
        share = target_share(shape, Layout(num_ranks, keeps_fp8=target.layout.keeps_fp8))
    except ValueError as error:
        raise ValueError(f"speculative_config.model is {config.model}: {error}") from None
    return PlannedDrafter("draft model", share, is_shared=is_shared, has_actor=config.placement == "actor")


DRAFTERS: dict[str, Callable[[Any, PlannedTarget], PlannedDrafter]] = {
    "suffix": _lookup,
    "ngram": _lookup,
    "draft_model": _draft_model,
    "mtp": _mtp,
}
