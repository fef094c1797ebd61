"""What a replica's numbers are made from: the table, the requests' clocks and the line in the log."""

import logging
from collections import defaultdict
from typing import Any

import pytest

from app.engine.outputs import GenerationRequest, SequenceDelta
from app.engine.sampling_params import SamplingParams
from app.llm_engine import LLMEngine
from app.serve import metrics
from app.serve.activity_log import describe_activity, log_activity
from app.serve.metric import PREFIX
from app.serve.metric_table import METRICS, REFUSALS
from app.serve.metrics import ReplicaMetrics, RequestMeter, difference
from app.serve.stats_reporter import StatsReporter
from tests.helpers.stub_engine import IDLE_STATS

PROMPT = [5, 9, 14, 9, 14, 9, 14, 77, 120]


@pytest.fixture
def engine(tiny_checkpoint) -> LLMEngine:
    return LLMEngine(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        device="cpu",
        max_model_len=128,
        max_num_seqs=2,
        speculative_config={"method": "ngram", "min_n": 1},
        progress=False,
    )


def read(stats: dict[str, Any], before: dict[str, Any]) -> dict[str, dict[str, float]]:
    since = difference(stats, before)
    return {metric.name: metric.read(stats, since) for metric in METRICS if metric.read is not None}


def test_names_are_prometheus_names_and_all_is_said_of_each() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.replace("_", "").isalnum()
        assert not metric.name.endswith("_total"), "Ray adds it"
        assert metric.unit
        assert metric.meaning.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.boundaries)
        assert list(metric.boundaries) == sorted(set(metric.boundaries))


def test_the_table_reads_a_real_engines_stats(engine: LLMEngine) -> None:
    before = engine.stats()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.generate([PROMPT, PROMPT[::-1], PROMPT[2:]], params, use_tqdm=False)
    stats = engine.stats()
    values = read(stats, before)
    assert values["prompt_tokens"] == {"": 25}
    assert values["generation_tokens"] == {"": 60}
    assert values["num_requests_running"] == values["num_requests_waiting"] == {"": 0}
    assert sum(values["phase_seconds"].values()) > 0
    assert set(values["phase_seconds"]) == {"propose", "verify", "sample", "rest"}
    accepted = values["spec_decode_num_accepted_tokens_per_pos"]
    assert sum(accepted.values()) == values["spec_decode_num_accepted_tokens"][""] == stats["num_accepted"]
    assert values["spec_decode_num_drafts"][""] == stats["drafted_per_position"][0] > 0
    assert values["spec_decode_num_verifications"][""] + stats["num_accepted"] == 60
    assert set(values["spec_decode_num_refused_tokens"]) == set(REFUSALS)
    assert values["spec_decode_max_draft_length"] == {"": 8}
    drafted = values["spec_decode_num_draft_tokens"][""]
    refused = sum(values["spec_decode_num_refused_tokens"].values())
    assert drafted + refused == 8 * (values["spec_decode_num_verifications"][""] - 3), "each prompt's end drafts none"
    assert values["spec_decode_speedup"][""] == stats["controller_measured_gain"] > 0
    assert values["spec_decode_draft_length"][""] == drafted / values["spec_decode_num_verifications"][""]


def test_a_stub_engine_says_what_a_real_one_does(engine: LLMEngine) -> None:
    assert IDLE_STATS.keys() <= engine.stats().keys()


def test_what_rose_since_the_last_look() -> None:
    before = {"num_steps": 3, "accepted_per_position": [2, 1]}
    after = {"num_steps": 7, "accepted_per_position": [5, 1, 4], "device": "cpu"}
    assert difference(after, before) == {"num_steps": 4, "accepted_per_position": [3, 0, 4]}
    assert difference(after, {}) == {"num_steps": 7, "accepted_per_position": [5, 1, 4]}


class Recorded:
    """In place of ReplicaMetrics."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, name: str, value: float, label: str = "") -> None:
        self.values[name, label].append(value)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return now


def make_meter(recorded: Recorded, n: int = 1) -> RequestMeter:
    return RequestMeter(recorded, GenerationRequest("r", [1, 2, 3], SamplingParams(), n))  # type: ignore[arg-type]


def delta(num_tokens: int, index: int = 0, reason: Any = None) -> SequenceDelta:
    return SequenceDelta("r", index, "", list(range(num_tokens)), finish_reason=reason)


def test_a_requests_times(recorded: Recorded, clock: list[float]) -> None:
    meter = make_meter(recorded)
    for now, step in ((102.0, delta(1)), (102.5, delta(3)), (104.5, delta(2, reason="stop"))):
        clock[0] = now
        meter.observe([step])
    meter.close()
    assert recorded.values == {
        ("time_to_first_token_seconds", ""): [2.0],
        ("inter_token_latency_seconds", ""): [0.5, 2.0],
        ("request_success", "stop"): [1],
        ("e2e_request_latency_seconds", ""): [4.5],
        ("request_prompt_tokens", ""): [3],
        ("request_generation_tokens", ""): [6],
        ("request_time_per_output_token_seconds", ""): [0.5],
    }


def test_each_choice_of_a_request_has_its_own_clock(recorded: Recorded, clock: list[float]) -> None:
    meter = make_meter(recorded, n=3)
    clock[0] = 101.0
    meter.observe([delta(1, 0, "length"), delta(1, 1)])
    clock[0] = 103.0
    meter.observe([delta(2, 1), SequenceDelta("r", 2, finish_reason="error", error="NaN")])
    meter.close()
    assert recorded.values["time_to_first_token_seconds", ""] == [1.0, 1.0]
    assert recorded.values["inter_token_latency_seconds", ""] == [2.0]
    ended = {label: len(values) for (name, label), values in recorded.values.items() if name == "request_success"}
    assert ended == {"length": 1, "error": 1, "abort": 1}


def test_a_refused_request_is_no_abort(recorded: Recorded) -> None:
    meter = make_meter(recorded, n=2)
    meter.refuse("overloaded")
    meter.close()
    assert recorded.values == {("requests_refused", "overloaded"): [1]}


def test_ray_gets_rises_of_counters_and_values_of_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, dict[str, str]]] = []
    for cls, method in ((metrics.metrics.Counter, "inc"), (metrics.metrics.Gauge, "set")):
        monkeypatch.setattr(cls, method, lambda self, value, tags: told.append((self.info["name"], value, tags)))
    stats = {**IDLE_STATS, "num_waiting": 2, "num_accepted": 7, "accepted_per_position": [4, 3], "propose_s": 0.5}
    ReplicaMetrics("m").record(stats, difference(stats, {**IDLE_STATS, "num_accepted": 5}))
    assert (f"{PREFIX}num_requests_waiting", 2, {}) in told
    assert (f"{PREFIX}num_requests_running", 0, {}) in told
    assert [entry for entry in told if "accepted" in entry[0] or "phase" in entry[0]] == [
        (f"{PREFIX}phase_seconds", 0.5, {"phase": "propose"}),
        (f"{PREFIX}spec_decode_num_accepted_tokens", 2, {}),
        (f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", 4, {"position": "0"}),
        (f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", 3, {"position": "1"}),
    ]
    assert f"{PREFIX}num_preemptions" not in [entry[0] for entry in told], "Ray takes no zeros"


BUSY = IDLE_STATS | {
    "num_steps": 50,
    "num_prompt_tokens": 1000,
    "num_generated_tokens": 480,
    "num_running": 3,
    "num_waiting": 1,
    "kv_usage": 0.25,
    "num_prefix_queried_tokens": 1000,
    "num_prefix_hit_tokens": 400,
    "num_speculative_tokens": 4,
    "num_verifications": 240,
    "num_drafted": 480,
    "num_accepted": 240,
    "drafted_per_position": [240, 160, 80],
    "accepted_per_position": [180, 40, 20],
}


def test_the_log_says_what_was_done_since_the_last_line() -> None:
    assert describe_activity(BUSY, difference(BUSY, IDLE_STATS), 10.0) == (
        "100.0 prompt and 48.0 generated tokens/s; 3 running, 1 waiting; KV 25.0% used; prefix hits 40.0%; "
        "2.00 drafts a sequence and step, at most 4; accepted by position 0.75 0.25 0.25; mean acceptance length 2.00"
    )
    later = {**BUSY, "num_steps": 60, "num_verifications": 250, "num_generated_tokens": 490, "num_drafter_faults": 2}
    later |= {"controller_emitted_tokens": 10, "controller_plain_tokens": 8.0, "controller_predicted_tokens": 12.0}
    later |= {"controller_num_decisions": 50, "controller_num_plain": 20}
    assert describe_activity(later, difference(later, BUSY), 10.0) == (
        "0.0 prompt and 1.0 generated tokens/s; 3 running, 1 waiting; KV 25.0% used; "
        "0.00 drafts a sequence and step, at most 4; accepted by position -; mean acceptance length 1.00; "
        "drafts in 60% of steps; 1.25 x plain, 1.50 predicted; drafter faults 2, 2 of them new"
    )
    assert "x plain" not in describe_activity(later, {**difference(later, BUSY), "controller_num_decisions": 4}, 10.0)


def test_without_drafts_the_log_does_not_speak_of_them() -> None:
    plain = {**BUSY, "num_speculative_tokens": 0, "num_drafted": 0, "drafted_per_position": []}
    line = describe_activity(plain, difference(plain, IDLE_STATS), 10.0)
    assert line.endswith("prefix hits 40.0%")


def test_the_log_is_silent_while_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ray.serve"):
        log_activity(BUSY | {"num_waiting": 0}, difference(BUSY, BUSY), 10.0)
        assert not caplog.records
        log_activity(BUSY, difference(BUSY, BUSY), 10.0)
    assert len(caplog.records) == 1, "a queue that stands still is told of"


@pytest.mark.parametrize(("interval_s", "num_lines"), [(0.0, 0), (1e-6, 2), (60.0, 0)])
async def test_the_reporter_hands_on_what_rose(
    interval_s: float, num_lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [IDLE_STATS | {"num_steps": 4}, BUSY, BUSY]
    rises: list[int] = []
    monkeypatch.setattr(ReplicaMetrics, "record", lambda self, stats, since: rises.append(since["num_steps"]))

    async def stats() -> dict[str, Any]:
        return looks.pop(0)

    reporter = StatsReporter(stats, ReplicaMetrics("m"), interval_s)
    reporter.close()
    with caplog.at_level(logging.INFO, "ray.serve"):
        for _ in range(3):
            await reporter.report()
    assert rises == [4, 46, 0]
    assert reporter.latest == BUSY
    assert len(caplog.records) == num_lines + (interval_s == 1e-6), "the queue stands still in the third"
