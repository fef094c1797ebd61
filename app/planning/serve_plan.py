"""From a Serve file's arguments to a plan."""

from dataclasses import asdict, dataclass
from typing import Any

from app.config import AppConfig
from app.planning.capacity import Capacity, plan_capacity
from app.planning.checkpoint_shape import read_checkpoint_shape
from app.planning.device import Device
from app.planning.network_share import Layout, target_share
from app.planning.planned_drafter import DRAFTERS, PlannedDrafter, PlannedTarget
from app.planning.prediction import BATCHES, Prediction, StepFloor, check_acceptance, predict, step_floor
from app.worker_loader import served_context

DEFAULT_CONTEXT_LEN = 4096


@dataclass(frozen=True)
class ServePlan:
    """What each rank holds, and how fast its steps can be. Ranks are alike, but for a drafter that rank 0 alone has."""

    model: str
    device: Device
    num_ranks: int
    method: str
    num_drafts: int  # at most
    max_model_len: int
    max_num_seqs: int
    context_len: int  # that floors are computed at
    target: PlannedTarget
    drafter: PlannedDrafter | None
    capacity: Capacity
    floors: list[tuple[StepFloor, StepFloor | None]]  # plain, and with drafts
    predictions: list[Prediction]

    def as_json(self) -> dict[str, Any]:
        weights = {name: part.num_bytes for name, part in self.target.share.parts.items()}
        if self.drafter is not None and self.drafter.share is not None:
            weights[self.drafter.name] = self.drafter.weight_bytes
        return {
            "model": self.model,
            "num_parameters": self.target.share.num_parameters,
            "device": asdict(self.device),
            "num_ranks": self.num_ranks,
            "expert_parallel": self.target.layout.expert_parallel,
            "method": self.method,
            "num_speculative_tokens": self.num_drafts,
            "rank_weight_bytes": weights,
            "rank_memory": asdict(self.capacity),
            "max_model_len": self.max_model_len,
            "context_len": self.context_len,
            "steps": [
                asdict(floor) | {"seconds": floor.seconds}
                for pair in self.floors
                for floor in pair
                if floor is not None
            ],
            "batches": BATCHES,
            "predictions": [asdict(prediction) for prediction in self.predictions],
        }


def plan_serving(
    config: AppConfig,
    model: str,  # as it is called in print
    device: Device,
    acceptance: list[float] | None,
    context_len: int | None,
) -> ServePlan:
    """Raises ValueError for what cannot be served as configured."""
    shape = read_checkpoint_shape(config.model, config.dtype)
    max_model_len = served_context(config, shape.config)
    if context_len is None:
        context_len = min(max_model_len, DEFAULT_CONTEXT_LEN)
    if context_len > max_model_len:
        raise ValueError(f"--context is {context_len}, above max_model_len, {max_model_len}: lower it")
    speculative = config.speculative_config
    layout = Layout(config.tensor_parallel_size, config.expert_parallel, device.reads_fp8)
    target = PlannedTarget(shape, layout, target_share(shape, layout))
    drafter = DRAFTERS[speculative.method](speculative, target) if speculative is not None else None
    num_drafts = speculative.draft_limit if speculative is not None else 0
    acceptance = _checked_acceptance(acceptance, config)

    capacity = plan_capacity(config, max_model_len, target, drafter, device)
    predictions = []
    if acceptance is not None:
        assert drafter is not None
        predictions = predict(target.share, drafter, device, acceptance, context_len)
    # Without figures every draft counts as accepted where its tokens cost the drafter something: the least favourable.
    accepted = acceptance[:num_drafts] if acceptance is not None else [1.0] * num_drafts

    def floor(num_sequences: int, accepted: list[float]) -> StepFloor:
        return step_floor(target.share, drafter, device, num_sequences, accepted, context_len)

    return ServePlan(
        model=model,
        device=device,
        num_ranks=layout.num_ranks,
        method=speculative.method if speculative is not None else "plain",
        num_drafts=num_drafts,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        context_len=context_len,
        target=target,
        drafter=drafter,
        capacity=capacity,
        floors=[(floor(batch, []), floor(batch, accepted) if accepted else None) for batch in BATCHES],
        predictions=predictions,
    )


def _checked_acceptance(acceptance: list[float] | None, config: AppConfig) -> list[float] | None:
    """Raises ValueError where it does not go with the configured drafts."""
    if acceptance is None:
        return None
    check_acceptance(acceptance)
    speculative = config.speculative_config
    if speculative is None:
        raise ValueError("--acceptance is given, and the file has no speculative_config: there are no drafts")
    if speculative.num_speculative_tokens != "auto" and len(acceptance) < speculative.draft_limit:
        raise ValueError(
            f"--acceptance has {len(acceptance)} shares, and num_speculative_tokens is {speculative.draft_limit}: "
            "give one for each draft"
        )
    return acceptance
