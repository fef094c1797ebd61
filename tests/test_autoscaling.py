"""The policy on recorded load, under Serve's own delays and bounds, second by second."""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from app.config import AppConfig
from app.serve.autoscaling import LoadPolicy

RECORDED = Path(__file__).parent / "assets" / "load.json"
TARGETS = {"target_queued_tokens": 1000.0, "target_kv_usage": 0.8}


@dataclass(frozen=True)
class Load:
    """Of all replicas together."""

    requests: float = 0.0
    queued_tokens: float = 0.0
    kv_usage: float = 0.0  # in whole pools


def serve_config(**fields: Any) -> AutoscalingConfig:
    autoscaling = {"target_ongoing_requests": 8.0, "max_replicas": 4, **TARGETS, **fields}
    config = AppConfig.model_validate({"model": "m/m", "deployment_config": {"autoscaling_config": autoscaling}})
    return AutoscalingConfig(**config.autoscaling_config.serve_options())


def context(load: Load, num_running: int, target: int, config: AutoscalingConfig, **fields: Any) -> AutoscalingContext:
    """As the controller makes it, with the load spread evenly over what runs."""
    replicas: list[Any] = [f"replica{i}" for i in range(num_running)]
    shares = {"queued_tokens": load.queued_tokens, "kv_usage": load.kv_usage}
    values: dict[str, Any] = {
        "deployment_id": None,
        "deployment_name": "TargetReplica",
        "app_name": "default",
        "current_num_replicas": num_running,
        "target_num_replicas": target,
        "running_replicas": replicas,
        "total_num_requests": load.requests,
        "total_queued_requests": 0.0,
        "aggregated_metrics": {
            name: dict.fromkeys(replicas, share / num_running) for name, share in shares.items() if num_running
        },
        "raw_metrics": {},
        "capacity_adjusted_min_replicas": config.min_replicas,
        "capacity_adjusted_max_replicas": config.max_replicas,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": None,
        "config": config,
    }
    return AutoscalingContext(**values | fields)


class Replay:
    """Serve's control loop once a second: its wrapper around the policy, its bounds, and replicas that start slowly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: AutoscalingConfig, start_s: int = 20) -> None:
        self.now = 0.0
        monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda: self.now))
        self._policy = autoscaling_policy._apply_autoscaling_config(LoadPolicy(**config.policy.policy_kwargs))
        self._config = config
        self._start_s = start_s
        self._ready_at: list[float] = [0.0] * config.min_replicas
        self._state: dict[str, Any] = {}
        self.targets: list[int] = []

    def run(self, loads: list[Load]) -> list[int]:
        """The target after each second."""
        for load in loads:
            self.now += 1
            num_running = sum(ready <= self.now for ready in self._ready_at)
            seen = context(load, num_running, len(self._ready_at), self._config, policy_state=self._state)
            decision, self._state = self._policy(seen)
            target = min(max(decision, self._config.min_replicas), self._config.max_replicas)
            self._ready_at = self._ready_at[:target] + [self.now + self._start_s] * (target - len(self._ready_at))
            self.targets.append(target)
        return self.targets


def changes(targets: list[int]) -> list[tuple[int, int]]:
    """Second and new number, of each change."""
    return [(second, after) for second, (before, after) in enumerate(pairwise(targets), start=2) if before != after]


@pytest.mark.parametrize(
    ("load", "num_replicas"),
    [
        (Load(), 1),
        (Load(requests=8), 1),
        (Load(requests=20), 3),
        (Load(kv_usage=1.6), 2),  # two replicas at their target
        (Load(kv_usage=0.8, queued_tokens=1000), 2),
        (Load(requests=2, kv_usage=0.9, queued_tokens=2500), 4),  # two long prompts are no small load
        (Load(requests=1000), 4),
    ],
)
def test_what_runs_and_what_waits_are_given_replicas(
    load: Load, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(monkeypatch, serve_config(upscale_delay_s=0, downscale_delay_s=0), start_s=0)
    assert replay.run([load] * 5)[-1] == num_replicas


def test_a_change_waits_for_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(monkeypatch, serve_config())
    targets = replay.run([Load()] * 10 + [Load(kv_usage=1.5)] * 100 + [Load(kv_usage=0.1)] * 700)
    assert changes(targets) == [(41, 2), (711, 1)]


def test_a_load_around_a_border_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the tolerance of what two replicas, or one, hold: neither up nor down, at any delay."""
    replay = Replay(monkeypatch, serve_config(upscale_delay_s=0, downscale_delay_s=0), start_s=0)
    replay.run([Load(requests=16)] * 2)
    assert changes(replay.run([Load(requests=7.3 + 2 * (second % 6)) for second in range(200)])) == []
    assert replay.run([Load(requests=7.1)])[-1] == 1


def test_a_queue_that_grows_while_a_replica_loads_calls_for_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    config = serve_config(upscale_delay_s=5)
    growing = [Load(requests=4, kv_usage=0.5, queued_tokens=600.0 + 50 * second) for second in range(100)]
    assert changes(Replay(monkeypatch, config, start_s=90).run(growing)) == [(6, 2)]
    assert Replay(monkeypatch, config, start_s=1).run(growing)[-1] > 2, "it stays once the replica is there"


def test_idle_replicas_go_down_to_the_least_number(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = [Load(requests=30)] * 60, [Load()] * 1300
    assert Replay(monkeypatch, serve_config()).run(busy + idle)[-1] == 1
    none = Replay(monkeypatch, serve_config(min_replicas=0))
    assert none.run([Load(requests=1)])[-1] == 1, "from none, at once"
    assert none.run(busy + idle)[-1] == 0


def test_no_replica_goes_while_one_has_not_reported() -> None:
    config = serve_config()
    policy = LoadPolicy(**TARGETS)
    idle = context(Load(), 2, 2, config)
    assert policy(idle) == (0, {})
    silent = {"kv_usage": {"replica0": 0.0}, "queued_tokens": {"replica0": 0.0}}
    assert policy(context(Load(), 2, 2, config, aggregated_metrics=silent)) == (2, {})
    assert policy(context(Load(), 2, 2, config, aggregated_metrics=None)) == (2, {})
    assert policy(context(Load(), 1, 2, config)) == (2, {}), "one is still loading"


def test_recorded_load_scales_up_once_a_wave_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's requests, queue and KV under 3, 12, 44 and 4 clients in turn."""
    recorded = json.loads(RECORDED.read_text())
    loads = [Load(*look) for look in recorded["looks"] for _ in range(recorded["period_s"])]
    config = serve_config(upscale_delay_s=5, downscale_delay_s=60, target_ongoing_requests=recorded["max_num_seqs"])
    targets = Replay(monkeypatch, config, start_s=10).run(loads + [Load()] * 200)
    peak = max(targets)
    assert peak > 1
    ups = [number for _, number in changes(targets)]
    top = ups.index(peak)
    assert ups[: top + 1] == sorted(ups[: top + 1]), "up, and not down between"
    assert ups[top:] == sorted(ups[top:], reverse=True), "then down, and not up again"
    assert targets[-1] == 1


def test_the_controller_needs_none_of_our_packages(tmp_path: Path) -> None:
    """As Serve does it: the policy is pickled where the application is built, and unpickled in the controller."""
    policy = AutoscalingPolicy(policy_function="app.serve.autoscaling:policy", policy_kwargs=TARGETS)
    pickled = tmp_path / "policy"
    pickled.write_bytes(policy.get_serialized_policy_def() or b"")
    code = (
        "import sys, pickle; made = pickle.load(open(sys.argv[1], 'rb'))(target_queued_tokens=1.0);"
        "print(type(made).__name__, [name for name in sys.modules if name.split('.')[0] in ('app', 'torch')])"
    )
    command = [sys.executable, "-c", code, str(pickled)]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.strip() == "LoadPolicy []"
