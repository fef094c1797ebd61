"""What a metric is, and how its values are read from the engine's stats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "forerun_"
RAY_PREFIX = "ray_"  # which Ray sets before every name

Stats = Mapping[str, Any]  # of the engine
Values = dict[str, float]  # by the value of the metric's label; under "" where it has none
Reader = Callable[[Stats, Stats], Values]  # from the engine's stats, and from what they rose by since the last report


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    read: Reader | None = None  # None: recorded as requests go by
    label: str | None = None  # beside `model_name`, and Serve's `deployment`, `replica` and `application`
    boundaries: tuple[float, ...] = ()
    vllm: bool = False  # vLLM has it under the same name, with the same meaning

    @property
    def exported_name(self) -> str:
        """As Ray's endpoint has it; a histogram's series add `_bucket`, `_count` and `_sum`."""
        return f"{RAY_PREFIX}{PREFIX}{self.name}" + "_total" * (self.kind == "counter")


def value(key: str) -> Reader:
    return lambda stats, since: {"": stats[key]}


def rise(key: str) -> Reader:
    return lambda stats, since: {"": since[key]}


def rises(**keys: tuple[str, ...]) -> Reader:
    """By label; several keys are summed."""
    return lambda stats, since: {label: sum(since[key] for key in names) for label, names in keys.items()}


def first_drafts(stats: Stats, since: Stats) -> Values:
    return {"": sum(since["drafted_per_position"][:1])}


def per_position(key: str) -> Reader:
    return lambda stats, since: {str(position): num for position, num in enumerate(since[key])}


def draft_length(stats: Stats, since: Stats) -> Values:
    steps = since["num_verifications"]
    return {"": since["num_drafted"] / steps} if steps else {}


def where_auto(reader: Reader) -> Reader:
    """Nothing where draft lengths are fixed: there is no controller then."""
    return lambda stats, since: reader(stats, since) if "controller_total_s" in stats else {}
