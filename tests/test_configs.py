"""Serve files: ours are valid, and wrong ones are told apart in one line before anything starts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app.config import AppConfig, UserConfig
from app.serve.config_file import ServeFile

REPOSITORY = Path(__file__).resolve().parent.parent
SERVE_FILES = sorted((REPOSITORY / "serve_configs").glob("*.yaml"))


def serve_file(tmp_path: Path, args: object, **application: object) -> Path:
    content = {"applications": [{"name": "default", "import_path": "app.main:build", "args": args, **application}]}
    return write(tmp_path, content)


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that passes for one: configurations are checked before its files are read."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 8192}')
    return folder


@pytest.fixture
def args(checkpoint: Path) -> dict[str, object]:
    return {"model": str(checkpoint)}


def test_there_are_serve_files() -> None:
    assert "quickstart.yaml" in [path.name for path in SERVE_FILES]


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_valid(path: Path, tmp_path: Path, checkpoint: Path) -> None:
    content = yaml.safe_load(path.read_text())
    (checkpoint / "config.json").write_text('{"max_position_embeddings": 163840}')
    for application in content["applications"]:  # the checkpoints themselves need not be here
        application["args"]["model"] = str(checkpoint)
        if (application["args"].get("speculative_config") or {}).get("method") == "draft_model":
            application["args"]["speculative_config"]["model"] = str(checkpoint)
    file = ServeFile(write(tmp_path, content))
    assert file.configs[0].model == str(checkpoint)
    assert file.configs[0].model_name == "checkpoint"


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_a_shipped_file_opens_no_port_to_the_network(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1"


WRONG_ARGS = {
    "misspelt": ({"max_seqs": 3}, "args.max_seqs is 3: unknown field; did you mean max_num_seqs?"),
    "method": (
        {"speculative_config": {"method": "telepathy"}},
        "args.speculative_config.method is 'telepathy': use one of 'suffix'",
    ),
    "no_method": ({"speculative_config": {"min_n": 2}}, "args.speculative_config.method: missing"),
    "method_field": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}},
        "args.speculative_config.num_speculative_tokens is 0: input should be greater than or equal to 1",
    ),
    "other_methods_field": (
        {"speculative_config": {"method": "ngram", "model": "x/y"}},
        "args.speculative_config.model is 'x/y': unknown field",
    ),
    "crossed": (
        {"speculative_config": {"method": "ngram", "min_n": 5, "max_n": 2}},
        "args.speculative_config.min_n is 5, above max_n, 2: lower min_n or raise max_n",
    ),
    "size": ({"block_size": 0}, "args.block_size is 0: input should be greater than or equal to 1"),
    "does_not_fit": (
        {"max_num_batched_tokens": 4, "max_num_seqs": 8},
        "args.max_num_batched_tokens is 4, below max_num_seqs, 8: a step must hold one token of every sequence",
    ),
    "context": (
        {"max_model_len": 9000},
        "args.max_model_len is 9000, above the checkpoint's max_position_embeddings, 8192: lower it",
    ),
    "union": ({"kv_cache_memory": "2GB"}, "args.kv_cache_memory is '2GB': input should be a valid integer"),
    "ranks": ({"tensor_parallel_size": 0}, "args.tensor_parallel_size is 0: input should be greater than or equal"),
    "heads": (
        {"model": "tests/assets/tiny-deepseek-v3", "tensor_parallel_size": 4},
        "args.tensor_parallel_size is 4, which does not divide the checkpoint's num_attention_heads, 6: use a divisor",
    ),
    "experts_without_ranks": (
        {"expert_parallel": True},
        "args.expert_parallel is True, and tensor_parallel_size 1: one rank holds all experts; remove the first",
    ),
    "no_such_folder": (
        {"model": "./models/nowhere"},
        "args.model is './models/nowhere': there is no such folder or file",
    ),
    "draft_folder": (
        {"speculative_config": {"method": "draft_model", "model": "./nowhere"}},
        "args.speculative_config.model is './nowhere': there is no such folder or file",
    ),
    "two_ways_to_scale": (
        {"deployment_config": {"num_replicas": 2, "autoscaling_config": {}}},
        "args.deployment_config.num_replicas is 2 beside an autoscaling_config: give one of them",
    ),
    "actor_option": (
        {"deployment_config": {"ray_actor_options": {"num_gpu": 1}}},
        "args.deployment_config.ray_actor_options.num_gpu is 1: unknown field; did you mean num_gpus?",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_ARGS.values(), ids=WRONG_ARGS)
def test_wrong_arguments_fail_in_one_line_with_their_path(
    wrong: dict[str, object], message: str, args: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the message is what is tested
        ServeFile(serve_file(tmp_path, args | wrong))
    assert str(raised.value).startswith(f"applications[0].{message}")
    assert "\n" not in str(raised.value)

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        AppConfig.model_validate(args | wrong)  # as Serve does, where nobody checked the file
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_every_wrong_field_is_named(args: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^applications\[0\]\.args\.dtype .*; applications\[0\]\.args\.block_size "):
        ServeFile(serve_file(tmp_path, args | {"block_size": -1, "dtype": "float8"}))


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(ValueError, match=r"^args\.model is .*weights': the folder has no config\.json"):
        AppConfig.model_validate({"model": str(tmp_path / "weights")})


def test_a_relative_folder_starts_here_then_at_the_root(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert AppConfig.model_validate({"model": "./checkpoint"}).model == str(checkpoint)
    monkeypatch.setattr("app.config.REPOSITORY", tmp_path)
    monkeypatch.chdir("/")
    assert AppConfig.model_validate({"model": "./checkpoint"}).model == str(checkpoint)


def test_a_hub_id_stays_as_it_is() -> None:
    config = AppConfig.model_validate({"model": "HuggingFaceTB/SmolLM2-135M-Instruct"})
    assert config.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.model_name == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"http_options": {"prot": 1}}, "http_options.prot: unknown field; did you mean port?"),
        ({"application": []}, "application: unknown field; did you mean applications?"),
        (
            {"applications": [{"import_path": "app.main:build", "arg": {}}]},
            "applications[0].arg: unknown field; did you mean args?",
        ),
        (
            {"applications": [{"import_path": "app.main:build", "deployments": [{"name": "x", "user_confg": {}}]}]},
            "applications[0].deployments[0].user_confg: unknown field; did you mean user_config?",
        ),
        ({"applications": [{"import_path": "else:where"}]}, "applications[0].import_path is 'else:where': use app"),
        ({"http_options": {"port": "x"}, "applications": []}, "http_options.port is 'x': input should be a valid int"),
        ({"http_options": {}}, "applications: missing"),
        ({"applications": []}, "applications is empty: give one with import_path app.main:build"),
    ],
)
def test_what_serve_would_ignore_or_report_later_is_refused(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ServeFile(write(tmp_path, content))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("user_config", "message"),
    [
        ({"num_speculative_tokens": -1}, "user_config.num_speculative_tokens is -1: input should be greater"),
        ({"num_drafts": 1}, "user_config.num_drafts is 1: unknown field"),
        ({"num_speculative_tokens": 5}, "user_config.num_speculative_tokens is 5: use at most 4"),
    ],
)
def test_a_wrong_user_config_is_refused(
    user_config: dict[str, object], message: str, args: dict[str, object], tmp_path: Path
) -> None:
    args |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    deployments = [{"name": "TargetReplica", "user_config": user_config}]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ServeFile(serve_file(tmp_path, args, deployments=deployments))
    assert str(raised.value).startswith(f"applications[0].deployments[0].{message}")


def test_two_scalers_are_refused(tmp_path: Path, args: dict[str, object]) -> None:
    """Serve itself would let them work against each other."""
    with pytest.raises(ValueError, match=r"^applications\[0\]\.external_scaler_enabled is True, and the"):
        ServeFile(serve_file(tmp_path, args, external_scaler_enabled=True))
    ServeFile(serve_file(tmp_path, args | {"deployment_config": {"num_replicas": 2}}, external_scaler_enabled=True))


def test_limits_follow_from_max_num_seqs(args: dict[str, object]) -> None:
    config = AppConfig.model_validate(args | {"max_num_seqs": 6})
    assert config.max_queued_requests == 24
    assert config.max_ongoing_requests >= 6 + 24
    assert config.autoscaling_config.target_ongoing_requests == 6
    assert config.autoscaling_config.min_replicas == 1

    given = {"max_queued_requests": 3, "autoscaling_config": {"max_replicas": 9, "target_ongoing_requests": 2}}
    config = AppConfig.model_validate(args | {"max_num_seqs": 6, "deployment_config": given})
    assert config.max_queued_requests == 3
    assert (config.autoscaling_config.max_replicas, config.autoscaling_config.target_ongoing_requests) == (9, 2)


def test_user_config_parses() -> None:
    assert UserConfig.parse({"num_speculative_tokens": 0}).num_speculative_tokens == 0
    assert UserConfig.parse({}).num_speculative_tokens is None


def test_build_makes_both_deployments_with_their_options(args: dict[str, object]) -> None:
    from app.main import build

    args |= {"max_num_seqs": 4, "num_threads": 2, "deployment_config": {"max_queued_requests": 8, "num_replicas": 3}}
    ingress = build(AppConfig.model_validate(args))._bound_deployment
    target = ingress.init_args[0]._bound_deployment
    assert (ingress.name, target.name) == ("Ingress", "TargetReplica")
    assert target.num_replicas == 3
    assert target.max_ongoing_requests == 24
    assert target.ray_actor_options["num_cpus"] == 2
    assert ingress.max_ongoing_requests >= 3 * target.max_ongoing_requests


def test_build_scales_by_default(args: dict[str, object]) -> None:
    from app.main import build

    ingress = build(AppConfig.model_validate(args | {"max_num_seqs": 4}))._bound_deployment
    autoscaling = ingress.init_args[0]._bound_deployment._deployment_config.autoscaling_config
    assert (autoscaling.min_replicas, autoscaling.max_replicas) == (1, 4)
    assert autoscaling.target_ongoing_requests == 4
    assert autoscaling.policy.policy_function == "app.serve.autoscaling:policy"
    assert autoscaling.policy.policy_kwargs == {"target_queued_tokens": 8192.0, "target_kv_usage": 0.8}


def test_a_replica_may_finish_its_longest_answer_before_it_goes(args: dict[str, object]) -> None:
    assert AppConfig.model_validate(args).graceful_shutdown_timeout_s == 1800
    assert AppConfig.model_validate(args | {"request_timeout_s": 60}).graceful_shutdown_timeout_s == 60
    given = args | {"deployment_config": {"graceful_shutdown_timeout_s": 5}}
    assert AppConfig.model_validate(given).graceful_shutdown_timeout_s == 5


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path: Path, args: dict[str, object]) -> None:
    path = serve_file(tmp_path, args)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        content = yaml.safe_load(path.read_text()) | {"http_options": {"host": "127.0.0.1", "port": port}}
        finished = launch(write(tmp_path, content))
    assert finished.returncode == 1
    assert finished.stderr.splitlines() == [
        f"{path}: http_options.port is {port}, and 127.0.0.1:{port} cannot be opened (Address already in use): "
        "stop what uses it, or choose another port"
    ]


def launch(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.serve.launch", str(path)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def test_the_check_prints_one_line(tmp_path: Path, args: dict[str, object]) -> None:
    path = serve_file(tmp_path, args | {"dtype": "float8"})
    finished = launch(path)
    assert finished.returncode == 1
    [line] = finished.stderr.splitlines()
    assert line.startswith(f"{path}: applications[0].args.dtype is 'float8'")
