"""The image, the compose file and the Kubernetes manifest: what they say of each other, of Serve files and code."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from app.config import AppConfig
from app.serve.config_file import ServeFile
from app.serve.launch import RAY_DEFAULTS
from app.serve.placement import check_placeable, rank_bundles

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKER = REPOSITORY / "docker"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
VOLUME, RAY_SERVICE = yaml.safe_load_all((DOCKER / "rayservice_deepseek_v3_mtp_2x8.yaml").read_text())
CLUSTER = RAY_SERVICE["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
PODS = {"head": CLUSTER["headGroupSpec"]["template"]["spec"], "worker": WORKERS["template"]["spec"]}
DEPENDENCY_FILES = {"pyproject.toml", "constraints.txt", "docker/requirements.py"}


@dataclass(frozen=True)
class Stage:
    """One FROM of the Dockerfile, with its instructions in order."""

    base: str
    name: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]

    def copied(self) -> list[str]:
        """Paths of the build context."""
        lines = [line.split() for line in self.all("COPY") if not line.startswith("--from=")]
        return [source for line in lines for source in line[:-1]]


def read_stages() -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage, and the stages."""
    text = (DOCKER / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    pairs = [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]
    starts = [index for index, (name, _) in enumerate(pairs) if name == "FROM"]
    arguments = dict(rest.split("=") for _, rest in pairs[: starts[0]])
    stages = []
    for start, end in zip(starts, [*starts[1:], len(pairs)], strict=True):
        base, _, name = pairs[start][1].partition(" AS ")
        stages.append(Stage(base, name, tuple(pairs[start + 1 : end])))
    return arguments, stages


ARGUMENTS, STAGES = read_stages()
FINAL = STAGES[-1]


def application_of(content: dict[str, Any]) -> dict[str, Any]:
    (application,) = content["applications"]
    return application


def installed_by(variant: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCKER / "requirements.py"), variant]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_a_change_of_code_installs_nothing_anew():
    for stage in STAGES[:-1]:
        assert set(stage.copied()) <= DEPENDENCY_FILES
    assert not any("pip" in command for command in FINAL.all("RUN"))
    names = [instruction for instruction, _ in FINAL.instructions]
    assert max(i for i, name in enumerate(names) if name == "RUN") < names.index("COPY")
    from_code = [i for i, (name, rest) in enumerate(FINAL.instructions) if name == "COPY" and "--from" not in rest]
    from_stages = [i for i, (name, rest) in enumerate(FINAL.instructions) if name == "COPY" and "--from" in rest]
    assert max(from_stages) < min(from_code)


def test_every_variant_is_a_stage_and_installs_the_tested_versions():
    names = [stage.name for stage in STAGES]
    assert {"torch-cpu", "torch-cuda"} <= set(names)
    assert [stage.base for stage in STAGES if stage.name == "dependencies"] == ["torch-${VARIANT}"]
    installs = [
        line for stage in STAGES for run in stage.all("RUN") for line in run.split("&&") if "pip install" in line
    ]
    assert len(installs) == 3
    assert all("-c constraints.txt" in line and "--no-cache-dir" in line for line in installs)


def test_python_and_torch_are_those_of_the_project():
    bases = {stage.base for stage in STAGES if stage.base.startswith("python:")}
    assert bases == {"python:${PYTHON}-slim-bookworm"}
    assert SpecifierSet(PROJECT["requires-python"]).contains(ARGUMENTS["PYTHON"] + ".0")
    (torch,) = [Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == "torch"]
    assert torch.specifier.contains(PINNED["torch"])
    assert CLUSTER["rayVersion"] == PINNED["ray"]


def test_an_image_has_the_projects_dependencies():
    declared = PROJECT["dependencies"]
    assert installed_by("cuda").stdout.splitlines() == declared
    cpu = installed_by("cpu").stdout.splitlines()
    assert [line for line in declared if line not in cpu] == [
        line for line in declared if Requirement(line).name == "triton"
    ]
    assert "VARIANT is 'gpu': use cpu or cuda" in installed_by("gpu").stderr


def test_the_context_is_what_is_copied_and_nothing_else():
    lines = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {source for stage in STAGES for source in stage.copied()}
    assert lines[0] == "*"
    assert allowed == copied
    assert all((REPOSITORY / source).exists() for source in copied)


def test_all_that_the_application_imports_of_the_project_is_copied():
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    imported = set()
    for folder in ("app", "models", "kernels"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imported |= {name.split(".")[0] for name in names}
    assert {"app", "models", "kernels"} == packages & imported
    assert packages & imported <= set(FINAL.copied())
    assert "PYTHONPATH=" + FINAL.all("WORKDIR")[-1] in FINAL.all("ENV")[0].split()


def test_the_image_runs_as_nobody_special_and_says_whether_it_is_well():
    user = FINAL.all("USER")[-1]
    assert int(user) > 0
    assert f"--uid {user}" in " ".join(FINAL.all("RUN"))
    assert "/health" in FINAL.all("HEALTHCHECK")[0]
    text = (DOCKER / "Dockerfile").read_text()
    assert not re.search(r"(?i)(token|secret|password|api_?key)\s*=", text)


def test_the_image_tells_ray_on_any_node_what_make_serve_tells_it():
    environment = dict(each.split("=", 1) for each in FINAL.all("ENV")[0].split())
    assert {name: environment[name] for name in environment if name.startswith("RAY_")} == {
        name: RAY_DEFAULTS[name] for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness")
    }, "the rest is for one machine, and of app.serve.launch, which the image runs"


def test_the_image_serves_a_file_that_is_in_it():
    command = json.loads(FINAL.all("CMD")[0])
    assert command[:3] == ["python", "-m", "app.serve.launch"]
    assert_in_image(command[3])
    assert_in_image(application_of(yaml.safe_load((REPOSITORY / command[3]).read_text()))["args"]["model"])


def assert_in_image(path: str) -> None:
    assert (REPOSITORY / path).exists()
    assert any(path == copied or path.startswith(f"{copied}/") for copied in FINAL.copied())


def test_the_compose_file_runs_a_file_that_is_in_the_image():
    head, worker = (" ".join(COMPOSE["services"][name]["command"]) for name in ("head", "worker"))
    assert set(COMPOSE["services"]) == {"head", "worker"}
    (path,) = re.findall(r"serve run --address=auto (\S+)", head)
    assert_in_image(path)
    (config,) = ServeFile(REPOSITORY / path).configs
    num_cpus = [float(each) for each in re.findall(r"--num-cpus=(\d+)", head + worker)]
    nodes = [{"CPU": each} for each in num_cpus]
    strategy = config.deployment_config.placement_group_strategy
    check_placeable(rank_bundles(config, has_gpus=False), strategy, nodes)
    with pytest.raises(ValueError, match="each on a node of its own"):
        check_placeable(rank_bundles(config, has_gpus=False), strategy, nodes[:1])
    port = re.findall(r"--port=(\d+)", head)
    assert port == re.findall(r"ray start --address=head:(\d+)", worker) == ["6379"]
    assert worker.count("head:6379") == 2


def test_the_compose_file_opens_no_port_to_the_network():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert all(service["build"]["dockerfile"] == "docker/Dockerfile" for service in COMPOSE["services"].values())


def test_two_nodes_are_two_ranks_but_for_what_is_marked():
    nodes = yaml.safe_load((DOCKER / "two_nodes.yaml").read_text())
    ranks = yaml.safe_load((REPOSITORY / "serve_configs" / "two_ranks.yaml").read_text())
    ranks["http_options"]["host"] = "0.0.0.0"
    args = application_of(ranks)["args"]
    args["num_threads"] = 1
    args["deployment_config"] |= {"placement_group_strategy": "STRICT_SPREAD", "wait_for_nodes": True}
    assert nodes == ranks


def test_the_manifest_serves_what_the_serve_file_says_but_for_what_is_marked(tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text(RAY_SERVICE["spec"]["serveConfigV2"])
    expected = yaml.safe_load((REPOSITORY / "serve_configs" / "deepseek_v3_mtp_2x8.yaml").read_text())
    expected["http_options"]["host"] = "0.0.0.0"
    application_of(expected)["args"]["deployment_config"]["wait_for_nodes"] = True
    assert yaml.safe_load(path.read_text()) == expected
    assert ServeFile(path).configs[0].tensor_parallel_size == 16


def test_the_manifests_nodes_hold_the_ranks():
    config = AppConfig.model_validate(application_of(yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"]))["args"])
    limits = PODS["worker"]["containers"][0]["resources"]["limits"]
    params = WORKERS["rayStartParams"]
    assert params["num-gpus"] == limits["nvidia.com/gpu"]
    resources = json.loads(json.loads(params["resources"]))
    node = {"CPU": float(limits["cpu"]), "GPU": float(params["num-gpus"]), **resources}
    strategy, bundles = config.deployment_config.placement_group_strategy, rank_bundles(config, has_gpus=True)
    check_placeable(bundles, strategy, [node] * WORKERS["minReplicas"])
    with pytest.raises(ValueError, match="can not hold its ranks"):
        check_placeable(bundles, strategy, [node] * (WORKERS["minReplicas"] - 1))
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]
    assert PODS["worker"]["terminationGracePeriodSeconds"] > config.graceful_shutdown_timeout_s


@pytest.mark.parametrize("role", PODS)
def test_a_pod_is_as_the_image_wants_it(role: str):
    pod = PODS[role]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == int(FINAL.all("USER")[-1])
    assert container["image"] == PODS["head"]["containers"][0]["image"]
    assert {"readinessProbe", "livenessProbe", "resources"} <= set(container)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/models"]["persistentVolumeClaim"]["claimName"] == VOLUME["metadata"]["name"]
    assert {"name": "HF_HOME", "value": "/models/huggingface"} in container["env"]
