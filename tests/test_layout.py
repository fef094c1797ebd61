"""The shape of the source tree: who may import whom, and how long a file may grow.

Rules are functions from a file to sentences of what is wrong; each is also shown a planted violation,
so that none can pass by seeing nothing.
"""

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("app", "models", "kernels")

# The layer of a module is that of its longest prefix here; a module imports its own layer and those below.
LAYERS = {
    "kernels": 0,
    "models": 1,
    "app.engine": 2,
    "app.speculative": 3,
    "app.llm_engine": 4,
    "app.async_engine": 4,
    "app.own_thread": 4,
    "app.executor": 4,
    "app.worker": 4,
    "app.follower": 4,
    "app.drafted_executor": 4,
    "app.drafter_loader": 4,
    "app.worker_loader": 4,
    "app.engine_config": 4,
    "app.config_errors": 4,
    "app.api": 5,
    "app.serve": 5,
    "app.main": 5,
    "app.config": 5,
    "app.deployment_config": 5,
    "app.plan": 5,
    "app.planning": 5,
}

# Where alone a package may be imported.
HOMES = {
    "ray": ("app.serve", "app.main"),
    "fastapi": ("app.serve", "app.api"),
    "starlette": ("app.serve", "app.api"),
    "triton": ("kernels",),
}
KERNEL_PACKAGES = {"torch", "numpy", "triton", "kernels"}
PYDANTIC_LAYER = 3

# Configuration, tokenizer and chat template; never modelling code.
TRANSFORMERS_NAMES = {
    "AutoConfig",
    "AutoTokenizer",
    "PreTrainedConfig",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
}

MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 70


@dataclass(frozen=True)
class SourceFile:
    """A file of the tree, or a planted one."""

    path: str  # from the root, with slashes
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        # CPython 3.11 miscounts its depth where a collection, and what hangs on it, falls into the parsing (gh-106905).
        gc.disable()
        try:
            return ast.parse(self.text, self.path)
        except SystemError:
            return ast.parse(self.text, self.path)
        finally:
            gc.enable()

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]

    @cached_property
    def imports(self) -> list[str]:
        """Dotted names of all that is imported, wherever in the file; `from a import b` gives a.b."""
        return [name for node in ast.walk(self.tree) for name in _imported(node, self.package)]


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            parents = package.split(".")
            module = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [module])])
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__"):
            yield str(node.args[0].value)


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def layer_of(module: str) -> int | None:
    prefixes = [prefix for prefix in LAYERS if is_within(module, prefix)]
    return LAYERS[max(prefixes, key=len)] if prefixes else None


def import_direction(file: SourceFile) -> Iterator[str]:
    layer = layer_of(file.module)
    if layer is None:
        if file.imports:
            yield f"{file.path} belongs to no layer"
        return
    for name in file.imports:
        if not is_within(name, *FOLDERS):
            continue
        imported = layer_of(name)
        if imported is None:
            yield f"{file.path} imports {name}, which belongs to no layer"
        elif imported > layer:
            yield f"{file.path} (layer {layer}) imports {name} (layer {imported})"


def packages_at_home(file: SourceFile) -> Iterator[str]:
    for name in file.imports:
        package = name.partition(".")[0]
        if package in HOMES and not is_within(file.module, *HOMES[package]):
            yield f"{file.path} imports {name}; {package} belongs in {', '.join(HOMES[package])}"
        if package == "pydantic" and (layer_of(file.module) or 0) < PYDANTIC_LAYER:
            yield f"{file.path} imports {name}; pydantic begins in app.speculative"
        known = package in KERNEL_PACKAGES or package in sys.stdlib_module_names
        if is_within(file.module, "kernels") and not known:
            yield f"{file.path} imports {name}; kernels import torch, triton and numpy only"


def no_modelling_code(file: SourceFile) -> Iterator[str]:
    for name in file.imports:
        if not is_within(name, "transformers"):
            continue
        if name.partition(".")[2] not in TRANSFORMERS_NAMES:
            yield f"{file.path} imports {name}; only {', '.join(sorted(TRANSFORMERS_NAMES))} may come from transformers"


def kernels_init_is_empty(file: SourceFile) -> Iterator[str]:
    if file.path == "kernels/__init__.py" and file.text.strip():
        yield f"{file.path} must stay empty: transformers probes for a package of that name"


def main_keeps_its_annotations(file: SourceFile) -> Iterator[str]:
    """Ray Serve validates a YAML's `args` by the annotation of `build`'s argument: a class, not the text of one."""
    if file.path == "app/main.py" and "__future__.annotations" in file.imports:
        yield f"{file.path} must not postpone its annotations"


def short_enough(file: SourceFile) -> Iterator[str]:
    """Lines of the file, and of each function's statements without signature and docstring."""
    num_lines = len(file.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{file.path} has {num_lines} lines; at most {MAX_FILE_LINES}"
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
        num_lines = (node.end_lineno or 0) - statements[0].lineno + 1 if statements else 0
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{file.path}: {node.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"


Rule = Callable[[SourceFile], Iterator[str]]

RULES: list[Rule] = [
    import_direction,
    packages_at_home,
    no_modelling_code,
    kernels_init_is_empty,
    main_keeps_its_annotations,
    short_enough,
]


def source_files() -> list[SourceFile]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [SourceFile(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    violations = [violation for file in source_files() for violation in rule(file)]
    assert not violations, "\n".join(violations)


def test_the_tree_is_seen() -> None:
    seen = {file.path for file in source_files()}
    assert {"kernels/ops.py", "kernels/__init__.py", "app/engine/plan.py", "models/kv_spec.py"} <= seen


PLANTED: list[tuple[Rule, str, str]] = [
    (import_direction, "kernels/a.py", "from models.kv_spec import LayerKVSpec"),
    (import_direction, "models/a.py", "import app.engine.plan"),
    (import_direction, "models/layers/a.py", "def f():\n    from app import worker"),
    (import_direction, "app/engine/a.py", "from app.speculative import proposer"),
    (import_direction, "app/engine/a.py", "from ..speculative.proposer import Proposer"),
    (import_direction, "app/engine/a.py", "from .. import llm_engine"),
    (import_direction, "app/speculative/a.py", "from app.engine_config import EngineConfig"),
    (import_direction, "app/worker.py", "import importlib\nimportlib.import_module('app.serve.messages')"),
    (import_direction, "app/novelty.py", "import torch"),
    (import_direction, "app/worker.py", "from app import novelty"),
    (packages_at_home, "app/worker.py", "import ray"),
    (packages_at_home, "app/api/a.py", "from ray import serve"),
    (packages_at_home, "app/main.py", "import fastapi"),
    (packages_at_home, "app/llm_engine.py", "from fastapi.responses import JSONResponse"),
    (packages_at_home, "models/a.py", "import triton.language as tl"),
    (packages_at_home, "models/config.py", "from pydantic import BaseModel"),
    (packages_at_home, "app/engine/a.py", "import pydantic"),
    (packages_at_home, "kernels/a.py", "import transformers"),
    (no_modelling_code, "models/a.py", "from transformers import AutoModelForCausalLM"),
    (no_modelling_code, "models/a.py", "from transformers.models.llama.modeling_llama import LlamaMLP"),
    (no_modelling_code, "app/api/a.py", "import transformers"),
    (kernels_init_is_empty, "kernels/__init__.py", '"""Kernels."""\n'),
    (main_keeps_its_annotations, "app/main.py", "from __future__ import annotations"),
    (short_enough, "models/a.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (short_enough, "models/a.py", "async def f():\n    '''Doc.'''\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)),
]


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_violation_is_seen(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(SourceFile(path, text)))) == 1


ALLOWED: list[tuple[str, str]] = [
    (
        "kernels/a.py",
        "import math\nimport numpy as np\nimport torch\nimport triton\nfrom kernels import ops",
    ),
    ("models/a.py", "from transformers import AutoTokenizer\nfrom kernels.metadata import AttentionMetadata"),
    ("app/engine/a.py", "from ..engine.plan import StepPlan\nfrom models.kv_spec import LayerKVSpec\nimport numpy"),
    ("app/speculative/a.py", "from pydantic import BaseModel\nfrom app.engine import plan"),
    ("app/api/a.py", "from fastapi import FastAPI\nfrom app.async_engine import AsyncEngine"),
    ("app/serve/a.py", "import ray\nfrom ray import serve\nfrom app import config\nfrom app.main import build"),
    ("app/main.py", "from ray import serve\nfrom app.config import AppConfig"),
    ("kernels/__init__.py", ""),
    ("models/a.py", "def f():\n    '''Doc.\n" + "\n" * 80 + "    '''\n"),
    ("models/a.py", "def f(\n" + "".join(f"    a{i},\n" for i in range(80)) + "):\n    return a0\n"),
]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert [violation for rule in RULES for violation in rule(SourceFile(path, text))] == []
