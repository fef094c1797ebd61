"""The compiled CPU kernels and the torch operators that serve without a compiler say the same."""

import pytest
import torch

import kernels.ops
from kernels import reference
from kernels.cpu import ops as cpu_ops
from kernels.cpu.library import load_library
from tests.test_lossless import ARCHITECTURES, GREEDY, make_engine, run

SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.fixture
def _compiled_or_not():
    yield
    load_library.cache_clear()
    kernels.ops.select_backend.cache_clear()


@pytest.mark.usefixtures("_compiled_or_not")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_are_equal_with_and_without_a_compiler(architecture, tiny_checkpoint, tmp_path, monkeypatch):
    folder = tiny_checkpoint(architecture)
    assert kernels.ops.select_backend("cpu", torch.float32) is cpu_ops
    compiled = run(make_engine(folder, None), GREEDY)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    load_library.cache_clear()
    kernels.ops.select_backend.cache_clear()
    assert kernels.ops.select_backend("cpu", torch.float32) is reference
    for speculative in (None, SUFFIX):
        assert run(make_engine(folder, speculative), GREEDY) == compiled
