"""The least time of a step, and what drafts make of it."""

from dataclasses import dataclass

from app.planning.device import Device
from app.planning.network_share import NetworkShare
from app.planning.pass_cost import PassCost, pass_cost
from app.planning.planned_drafter import PlannedDrafter

BATCHES = (1, 8, 64)


@dataclass(frozen=True)
class StepFloor:
    """A decode step of so many sequences, with so many drafts each."""

    num_sequences: int
    num_drafts: int
    num_rows: int  # of the target's pass
    experts_touched: float | None  # in a layer, over all ranks
    target: PassCost
    draft_s: float

    @property
    def seconds(self) -> float:
        return self.target.seconds + self.draft_s


@dataclass(frozen=True)
class Prediction:
    """Of one number of drafts: tokens a sequence and step, and the speed beside plain decoding by batch."""

    num_drafts: int
    tokens_a_step: float
    speedups: tuple[float, ...]  # in the order of BATCHES


def step_floor(
    target: NetworkShare,
    drafter: PlannedDrafter | None,
    device: Device,
    num_sequences: int,
    acceptance: list[float],  # of each draft; empty: plain decoding
    context_len: int,
) -> StepFloor:
    num_rows = num_sequences * (1 + len(acceptance))
    passes = drafter.passes(device, num_sequences, acceptance, context_len) if drafter is not None else []
    return StepFloor(
        num_sequences=num_sequences,
        num_drafts=len(acceptance),
        num_rows=num_rows,
        experts_touched=target.experts.expected(num_rows) if target.experts is not None else None,
        target=pass_cost(target, device, num_sequences, num_rows, num_rows, context_len),
        draft_s=sum(cost.seconds for cost in passes),
    )


def predict(
    target: NetworkShare, drafter: PlannedDrafter, device: Device, acceptance: list[float], context_len: int
) -> list[Prediction]:
    """For every number of drafts from none to as many as acceptance is given for."""
    predictions = []
    for num_drafts in range(len(acceptance) + 1):
        accepted = acceptance[:num_drafts]
        tokens = 1 + sum(accepted)
        speedups = []
        for num_sequences in BATCHES:
            plain = step_floor(target, drafter, device, num_sequences, [], context_len)
            drafted = step_floor(target, drafter, device, num_sequences, accepted, context_len)
            speedups.append(tokens * plain.seconds / drafted.seconds)
        predictions.append(Prediction(num_drafts, tokens, tuple(speedups)))
    return predictions


def check_acceptance(acceptance: list[float]) -> None:
    """Raises ValueError unless it is what the server's metrics say: of each draft, all before it included."""
    if not all(0 <= share <= 1 for share in acceptance):
        raise ValueError(f"--acceptance is {_listed(acceptance)}: give shares between 0 and 1, one a draft")
    if acceptance != sorted(acceptance, reverse=True):
        raise ValueError(
            f"--acceptance is {_listed(acceptance)}: a draft is kept only where all before it are, so no share can "
            "exceed the one before; give the shares that the metrics report by position"
        )


def _listed(acceptance: list[float]) -> str:
    return ",".join(f"{share:g}" for share in acceptance)
