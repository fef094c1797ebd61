"""The Triton kernels: results against the twins, and compilation for the GPUs of three generations."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is published for Linux on x86-64 only"
)


@pytest.mark.timeout(600)
def test_kernels_compute_what_their_twins_do() -> None:
    """On a GPU where there is one, else under the interpreter, in a process of its own: it is chosen at import."""
    environment = os.environ | {"TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/helpers/triton_cases.py"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    summary = re.search(r"(\d+) passed", finished.stdout)
    assert summary, finished.stdout
    assert int(summary[1]) > 60
    assert "skipped" not in finished.stdout


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`launches()` -> what launching every kernel on small batches asks to compile."""
    from kernels import (
        grouped_linear,
        latent_attention,
        paged_attention,
        rms_norm,
        rotary_embedding,
        scaled_linear,
        silu_and_mul,
        store_kv,
        store_latent,
    )
    from kernels.packed_weight import BlockScaledWeight
    from tests.helpers.attention_case import make_case
    from tests.helpers.triton_launch import Launch, LaunchRecorder

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorded: list[Launch] = []
    for module in (
        grouped_linear,
        latent_attention,
        paged_attention,
        rms_norm,
        rotary_embedding,
        scaled_linear,
        silu_and_mul,
        store_kv,
        store_latent,
    ):
        for name in [name for name in vars(module) if re.fullmatch(r"_\w+_kernel", name)]:
            monkeypatch.setattr(module, name, LaunchRecorder(getattr(module, name), recorded))

    def launch_all(dtype: torch.dtype, with_fp8: bool = False) -> list[Launch]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype)

        def scaled(*shape: int) -> BlockScaledWeight:
            scale = torch.ones(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
            return BlockScaledWeight(torch.zeros(shape, dtype=torch.float8_e4m3fn), scale, (128, 128), dtype)

        for seqlens, head_dim, window in (([(70, 90), (1, 5)], 64, None), ([(5, 1100)], 128, 300)):
            case = make_case(seqlens, 6, 2, head_dim).to(dtype)
            paged_attention.paged_attention(
                case.query, case.key_cache, case.value_cache, case.metadata, case.scale, window
            )
        key, pool = randn(4, 2, 64), randn(3, 16, 2, 64)
        store_kv.store_kv(key, key, pool, pool, torch.zeros(4, dtype=torch.int64))
        rms_norm.rms_norm(randn(4, 6, 64), randn(64), 1e-5)
        rms_norm.add_rms_norm(randn(4, 576), randn(4, 576), randn(576), 1e-5)
        for interleaved in (False, True):
            rotary_embedding.rotary_embedding(
                torch.zeros(4, dtype=torch.int64), randn(4, 6, 64), key, torch.zeros(9, 64), interleaved
            )
        silu_and_mul.silu_and_mul(randn(4, 3072))
        for seqlens in ([(5, 1100)], [(1, 90)] * 3):  # at DeepSeek-V3's width, each split by itself and all in one
            case = make_case(seqlens, 16, 1, 576).to(dtype)
            latent_attention.latent_attention(case.query, case.key_cache[:, :, 0], case.metadata, case.scale, 512)
        store_latent.store_latent(randn(4, 576), randn(3, 16, 576), torch.zeros(4, dtype=torch.int64))
        grouped_linear.grouped_linear(randn(4, 128), torch.tensor([1, 0, 3]), randn(3, 256, 128), torch.float32)
        if with_fp8:
            for num_rows in (4, 40):
                scaled_linear.scaled_linear(randn(num_rows, 256), scaled(256, 256))
            grouped_linear.grouped_linear(randn(4, 256), torch.tensor([1, 0, 3]), scaled(3, 256, 256))
        return recorded

    return launch_all


@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, torch.bfloat16), (90, torch.bfloat16), (100, torch.bfloat16), (80, torch.float32)]
)
def test_every_launch_compiles(launches, capability: int, dtype: torch.dtype) -> None:
    """Ampere, Hopper, Blackwell, by the assembler that Triton brings; no GPU takes part. Ampere does not read FP8."""
    with_fp8 = capability >= 89
    compiled = [launch.compile(capability) for launch in launches(dtype, with_fp8)]
    assert len(compiled) == 14 + 3 * with_fp8
    for kernel in compiled:
        assert f"sm_{capability}" in kernel.asm["ptx"]
        # 99 KiB: what a block may have on compute capability 8.6 and 8.9, the smallest of these generations.
        assert kernel.metadata.shared <= 99 * 1024, kernel.name


def test_nothing_of_the_batch_is_compiled_in(launches) -> None:
    """A length or count that reached the compile key would compile anew in the midst of serving."""
    from kernels import paged_attention
    from tests.helpers.attention_case import make_case

    recorded = launches(torch.bfloat16)
    keys = []
    for seqlens in ([(5, 1100)], [(5, 8200)] * 2, [(4, 16 * 600)] * 16):
        recorded.clear()
        case = make_case(seqlens, 6, 2, 64).to(torch.bfloat16)
        paged_attention.launch_attention(
            case.query, case.key_cache, case.value_cache, case.metadata, case.scale, None, spread=True
        )
        keys.append([launch.source().hash() for launch in recorded])
    assert len(keys[0]) == 2
    assert keys[0] == keys[1] == keys[2]
