"""A replica's numbers in Ray's metrics, whose endpoint Prometheus reads."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

from ray.serve import metrics

from app.engine.outputs import GenerationRequest, SequenceDelta
from app.serve.metric import PREFIX, Metric, Stats
from app.serve.metric_table import METRICS

RayMetric = metrics.Counter | metrics.Gauge | metrics.Histogram


class ReplicaMetrics:
    """All metrics of the table, labelled with the model's name; made in the replica, whose labels Serve adds.

    A counter shows with its first count: Ray takes no zeros.
    """

    def __init__(self, model_name: str) -> None:
        self._metrics = {metric.name: _make(metric, model_name) for metric in METRICS}
        self._labels = {metric.name: metric.label for metric in METRICS}

    def record(self, stats: Stats, since: Stats) -> None:
        """Takes the engine's stats, and what they rose by since they were recorded last."""
        for metric in METRICS:
            if metric.read is not None:
                for label, value in metric.read(stats, since).items():
                    self.add(metric.name, value, label)

    def add(self, name: str, value: float, label: str = "") -> None:
        """Counts `value`, sets a gauge to it, or observes it."""
        metric, key = self._metrics[name], self._labels[name]
        tags = {} if key is None else {key: label}
        if isinstance(metric, metrics.Gauge):
            metric.set(value, tags)
        elif isinstance(metric, metrics.Histogram):
            metric.observe(value, tags)
        elif value > 0:
            metric.inc(value, tags)

    def meter(self, request: GenerationRequest) -> "RequestMeter":
        return RequestMeter(self, request)


class RequestMeter:
    """The clock of one request at its replica, from arrival to the end of each of its sequences."""

    def __init__(self, replica_metrics: ReplicaMetrics, request: GenerationRequest) -> None:
        self._metrics = replica_metrics
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._start = time.perf_counter()
        self._open = {index: _SequenceClock() for index in range(request.n)}

    def observe(self, deltas: list[SequenceDelta]) -> None:
        """What is delivered now; a few microseconds a sequence."""
        now = time.perf_counter()
        for delta in deltas:
            clock = self._open[delta.index]
            if delta.token_ids:
                if clock.first is None:
                    clock.first = now
                    self._metrics.add("time_to_first_token_seconds", now - self._start)
                else:
                    self._metrics.add("inter_token_latency_seconds", now - clock.last)
                clock.last = now
                clock.num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish(self._open.pop(delta.index), delta.finish_reason, now)

    def close(self) -> None:
        """What has not ended by now never will: its client is gone, or the engine."""
        for _ in self._open:
            self._metrics.add("request_success", 1, "abort")
        self._open.clear()

    def refuse(self, reason: str) -> None:
        """The request is answered with an error, in place of what is still open."""
        self._open.clear()
        self._metrics.add("requests_refused", 1, reason)

    def _finish(self, clock: "_SequenceClock", reason: str, now: float) -> None:
        self._metrics.add("request_success", 1, reason)
        if reason not in ("stop", "length"):
            return
        self._metrics.add("e2e_request_latency_seconds", now - self._start)
        self._metrics.add("request_prompt_tokens", self._num_prompt_tokens)
        self._metrics.add("request_generation_tokens", clock.num_tokens)
        if clock.first is not None and clock.num_tokens > 1:
            mean_s = (clock.last - clock.first) / (clock.num_tokens - 1)
            self._metrics.add("request_time_per_output_token_seconds", mean_s)


class _SequenceClock:
    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.num_tokens = 0


def difference(after: Stats, before: Stats) -> dict[str, Any]:
    """What numbers, and lists of them, have risen by; lists may have grown. All, where there was nothing before."""
    numbers = {key: value for key, value in after.items() if isinstance(value, int | float | list)}
    return {key: _subtract(value, before.get(key, 0)) for key, value in numbers.items()}


def _subtract(value: Any, other: Any) -> Any:
    if isinstance(value, list):
        return [a - b for a, b in itertools.zip_longest(value, other or [], fillvalue=0)]
    return value - other


def _make(metric: Metric, model_name: str) -> RayMetric:
    keys = ("model_name",) if metric.label is None else ("model_name", metric.label)
    fields: Mapping[str, Any] = {
        "name": PREFIX + metric.name,
        "description": f"{metric.meaning} [{metric.unit}]",
        "tag_keys": keys,
    }
    made: RayMetric
    if metric.kind == "histogram":
        made = metrics.Histogram(**fields, boundaries=list(metric.boundaries))
    elif metric.kind == "gauge":
        made = metrics.Gauge(**fields)
    else:
        made = metrics.Counter(**fields)
    made.set_default_tags({"model_name": model_name})
    return made
