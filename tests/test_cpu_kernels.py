"""The compiled CPU kernels against their torch twins, and a row's result against the company it has in a call.

Everything runs once for each instruction set that the C sources know and this CPU has.
"""

import dataclasses
import functools
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels.ops
from kernels import composed, reference
from kernels.cpu import calls, ops, threads
from kernels.cpu.compiler import TARGET_FLAGS, CompilationError, build_library, find_compiler
from kernels.cpu.library import Library, load_library
from kernels.packed_weight import PackedWeight
from tests.helpers.attention_case import AttentionCase, attention_by_rows, make_case

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

DTYPES = [torch.float32, torch.bfloat16]
ROOT = Path(__file__).parent.parent


def instruction_sets() -> dict[str, tuple[tuple[str, ...], ...]]:
    """Compiler flags by name, of those that this CPU can run."""
    levels = {"native": TARGET_FLAGS}
    if platform.machine() in ("x86_64", "AMD64"):
        capability = torch.backends.cpu.get_cpu_capability()
        levels["baseline"] = (("-march=x86-64",),)
        if capability in ("AVX2", "AVX512"):
            levels["avx2"] = (("-march=x86-64-v3",),)
        if capability == "AVX512":
            levels["avx512"] = (("-march=x86-64-v4",),)
            if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
                levels["avx512_bf16"] = (("-march=x86-64-v4", "-mavx512bf16"),)
    return levels


@pytest.fixture(scope="module", params=sorted(instruction_sets()))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(build_library(tmp_path_factory.mktemp("kernels"), instruction_sets()[request.param]))


@pytest.fixture
def _compiled(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The launchers call this library, and what they allocate holds nan until it is written."""
    monkeypatch.setattr(calls, "load_library", lambda: library)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values one element off any alignment."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a rounding of the result's type and the order of fp32 sums."""
    rtol = 1e-5 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=2e-5)


SHAPES = [(1, 1), (5, 7), (31, 33), (64, 64), (100, 34), (77, 131), (96, 320)]


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("dtype", DTYPES)
class TestLinear:
    @pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
    def test_equals_the_product_in_fp64(self, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
        weight = random(num_rows, num_columns, dtype=dtype, scale=num_columns**-0.5)
        bias = random(num_rows, dtype=dtype, seed=1)
        packed = ops.pack_weight(weight)
        assert packed.shape == weight.shape
        for num_tokens in (0, *range(1, 10), 17, 33, 130):
            x = random(num_tokens, num_columns, dtype=dtype, seed=2)
            for out_dtype in (None, torch.float32, torch.bfloat16):
                out = ops.linear(x, packed, bias, out_dtype)
                assert out.dtype == (out_dtype or dtype)
                assert_close(out, x.double() @ weight.double().T + bias.double())
            assert_close(ops.linear(x, packed), x.double() @ weight.double().T)

    @pytest.mark.parametrize(("num_rows", "num_columns"), [(5, 7), (100, 34), (77, 131), (288, 160)])
    def test_a_row_does_not_depend_on_the_others(self, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
        packed = ops.pack_weight(random(num_rows, num_columns, dtype=dtype))
        bias = random(num_rows, dtype=dtype, seed=1)
        x = random(300, num_columns, dtype=dtype, seed=2)
        alone = torch.cat([ops.linear(row, packed, bias, torch.float32) for row in x.split(1)])
        for num_tokens in (*range(1, 41), 97, 300):
            assert torch.equal(ops.linear(x[:num_tokens], packed, bias, torch.float32), alone[:num_tokens])
            assert torch.equal(ops.linear(x[-num_tokens:], packed, bias, torch.float32), alone[-num_tokens:])

    @pytest.mark.parametrize("num_columns", [33, 64])
    def test_takes_slices_more_dimensions_and_any_alignment(self, dtype: torch.dtype, num_columns: int) -> None:
        weight = random(70, num_columns, dtype=dtype)
        packed = ops.pack_weight(weight)
        packed = PackedWeight(unaligned(packed.data), packed.num_rows, packed.num_columns)
        part = random(6, 80, dtype=dtype, seed=1)[:, 7 : 7 + num_columns]
        plain = ops.linear(part.contiguous(), packed)
        assert_close(plain, reference.linear(part.contiguous(), weight))
        assert torch.equal(ops.linear(part, packed), plain)
        assert torch.equal(ops.linear(unaligned(part), packed), plain)
        assert torch.equal(ops.linear(part.reshape(2, 3, num_columns), packed), plain.view(2, 3, 70))
        assert torch.equal(ops.linear(part.t().contiguous().t(), packed), plain)

    def test_the_number_of_threads_does_not_matter(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        packed = ops.pack_weight(random(1000, 64, dtype=dtype))
        x = random(50, 64, dtype=dtype, seed=1)
        results = []
        for num_threads in (1, 2, 3):
            monkeypatch.setattr(threads, "_chosen", num_threads)
            results.append(ops.linear(x, packed))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_serves_plain_weights_by_torch(self, dtype: torch.dtype) -> None:
        weight, x = random(9, 6, dtype=dtype), random(3, 6, dtype=dtype, seed=1)
        assert torch.equal(ops.linear(x, weight), reference.linear(x, weight))
        assert torch.equal(ops.embedding(torch.tensor([8, 0]), weight), weight[[8, 0]])

    @pytest.mark.parametrize("num_columns", [20, 64])
    def test_nan_and_infinity_stay_in_their_row(self, dtype: torch.dtype, num_columns: int) -> None:
        packed = ops.pack_weight(random(40, num_columns, dtype=dtype))
        x = random(5, num_columns, dtype=dtype, seed=1)
        poisoned = x.clone()
        poisoned[2] = torch.nan
        poisoned[3] = torch.inf
        out, clean = ops.linear(poisoned, packed), ops.linear(x, packed)
        assert torch.equal(out[[0, 1, 4]], clean[[0, 1, 4]])
        assert out[2].isnan().all()
        assert not out[3].isfinite().any()


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("dtype", DTYPES)
class TestRowKernels:
    @pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
    def test_embedding_reads_the_packed_rows(self, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
        weight = random(num_rows, num_columns, dtype=dtype)
        packed = ops.pack_weight(weight)
        token_ids = torch.randint(num_rows, (70,), generator=torch.Generator().manual_seed(1))
        assert torch.equal(ops.embedding(token_ids, packed), weight[token_ids])
        assert torch.equal(ops.embedding(torch.arange(num_rows), packed), weight)
        assert ops.embedding(token_ids[:0], packed).shape == (0, num_columns)
        for bad in (-1, num_rows):
            with pytest.raises(IndexError, match="token id"):
                ops.embedding(torch.tensor([0, bad]), packed)

    @pytest.mark.parametrize("width", [1, 15, 16, 33, 576])
    def test_rms_norm(self, dtype: torch.dtype, width: int) -> None:
        weight = random(width, dtype=dtype, seed=1)
        for num_rows in (0, 1, 3, 100):
            x = random(num_rows, width, dtype=dtype)
            assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        wide = random(4, 3, width + 5, dtype=dtype)
        heads = wide[..., 2 : 2 + width]
        assert_close(ops.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))
        rows = torch.cat([ops.rms_norm(row, weight, 1e-5) for row in heads.reshape(-1, width).split(1)])
        assert torch.equal(ops.rms_norm(heads, weight, 1e-5).view(-1, width), rows)

    @pytest.mark.parametrize("width", [1, 15, 33, 576])
    def test_add_rms_norm(self, dtype: torch.dtype, width: int) -> None:
        weight = random(width, dtype=dtype, seed=1)
        for num_rows in (0, 1, 3, 100):
            x, residual = random(num_rows, width, dtype=dtype), random(num_rows, width, dtype=dtype, seed=2)
            normed, added = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
            twin_normed, twin_added = reference.add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(added, twin_added)
            assert_close(normed, twin_normed)

    @pytest.mark.parametrize("width", [1, 15, 33, 1536])
    def test_silu_and_mul(self, dtype: torch.dtype, width: int) -> None:
        for num_rows in (0, 1, 3, 40):
            gate_up = random(num_rows, 2 * width, dtype=dtype, scale=5)
            assert_close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
        wide = random(5, 2 * width + 3, dtype=dtype)
        assert torch.equal(ops.silu_and_mul(wide[:, 1:-2]), ops.silu_and_mul(wide[:, 1:-2].contiguous()))

    @pytest.mark.parametrize("width", [1, 16, 33, 64])
    @pytest.mark.parametrize("second_leads", [False, True])
    def test_join_norms(self, dtype: torch.dtype, width: int, second_leads: bool) -> None:
        weights = [random(width, dtype=dtype, seed=seed) for seed in (1, 2)]
        for num_tokens in (0, 1, 2, 5, 33, 1030):
            x, second = (random(num_tokens, 2 * width, dtype=dtype, seed=seed, scale=3)[:, :width] for seed in (3, 4))
            positions = torch.arange(num_tokens) % 4
            arguments = (x, weights[0], second, weights[1], 1e-5, positions, second_leads)
            fused = ops.join_norms(*arguments)
            assert torch.equal(fused, composed.join_norms(ops, *arguments))
            assert_close(fused, composed.join_norms(reference, *arguments))

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (20, 12), (64, 64), (96, 96), (128, 64)])
    def test_rotary_embedding(self, dtype: torch.dtype, interleaved: bool, head_dim: int, rotary_dim: int) -> None:
        cos_sin_cache = random(50, rotary_dim, dtype=torch.float32)
        for num_tokens in (0, 1, 7, 200):
            qkv = random(num_tokens, 7 * head_dim, dtype=dtype, seed=1)
            query = qkv[:, : 4 * head_dim].view(num_tokens, 4, head_dim)
            key = qkv[:, 4 * head_dim : 6 * head_dim].view(num_tokens, 2, head_dim)
            value = qkv[:, 6 * head_dim :].clone()
            positions = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(2))
            twins = reference.rotary_embedding(positions, query, key, cos_sin_cache, interleaved)
            rotated = ops.rotary_embedding(positions, query, key, cos_sin_cache, interleaved)
            for actual, expected in zip(rotated, twins, strict=True):
                assert_close(actual, expected)
            assert torch.equal(qkv[:, 6 * head_dim :], value)
        with pytest.raises(IndexError, match="position"):
            ops.rotary_embedding(torch.tensor([50]), query[:1], key[:1], cos_sin_cache, interleaved)

    @pytest.mark.parametrize("block_size", [1, 8, 16])
    def test_store_kv_writes_its_slots_only(self, dtype: torch.dtype, block_size: int) -> None:
        qkv = random(9, 5 * 6, dtype=dtype)
        key, value = qkv[:, 6:18].view(9, 2, 6), qkv[:, 18:].view(9, 2, 6)
        caches = [torch.full((20, block_size, 2, 6), torch.nan, dtype=dtype) for _ in range(4)]
        slots = torch.randperm(20 * block_size, generator=torch.Generator().manual_seed(1))[:9]
        slots[[2, 5]] = -1
        ops.store_kv(key, value, caches[0], caches[1], slots)
        reference.store_kv(key, value, caches[2], caches[3], slots)
        for actual, expected in ((caches[0], caches[2]), (caches[1], caches[3])):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        ops.store_kv(key[:0], value[:0], caches[0], caches[1], slots[:0])
        with pytest.raises(IndexError, match="slot"):
            ops.store_kv(key[:1], value[:1], caches[0], caches[1], torch.tensor([20 * block_size]))


@pytest.mark.usefixtures("_compiled")
def test_exponentials_are_accurate_over_their_range() -> None:
    """silu(x) * 1 / x = sigmoid(x), whose small values are exponentials."""
    gate = torch.cat([-torch.logspace(-3, 1.93, 3000), torch.logspace(-3, 2, 3000)])
    expected = (gate.double().sigmoid() * gate.double())[None]
    actual = ops.silu_and_mul(torch.stack([gate, torch.ones_like(gate)]).view(1, -1)).double()
    assert ((actual - expected) / expected).abs().max() < 1e-6
    gates = [-87.2, -90.0, -200.0, -1e30, -3e38, -torch.inf, 0.0, 1e30, torch.inf, torch.nan]
    extremes = torch.tensor([[*gates, *[1.0] * len(gates)]])
    torch.testing.assert_close(ops.silu_and_mul(extremes), reference.silu_and_mul(extremes), equal_nan=True)


@pytest.mark.usefixtures("_compiled")
def test_float_results_round_to_bf16_like_torch() -> None:
    values = torch.cat([torch.randn(1000), torch.tensor([torch.inf, -torch.inf, 3.4e38, 1.00390625, 1.01171875, -0.0])])
    out = ops.linear(values[:, None], ops.pack_weight(torch.ones(1, 1)), out_dtype=torch.bfloat16)
    assert torch.equal(out[:, 0], values.bfloat16())


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("dtype", DTYPES)
class TestFused:
    """Several kernels in one call give bit for bit what one call each does."""

    @pytest.mark.parametrize(
        ("width", "num_columns"), [(1, 1), (32, 34), (50, 33), (96, 131), (33, 64), (32, 64), (96, 160)]
    )
    def test_linear_silu_and_mul(self, dtype: torch.dtype, width: int, num_columns: int) -> None:
        weight = random(2 * width, num_columns, dtype=dtype, scale=num_columns**-0.5)
        packed = ops.pack_weight(weight)
        for num_tokens in (0, 1, 2, 5, 33, 130):
            x = random(num_tokens, num_columns, dtype=dtype, seed=1, scale=3)
            fused = ops.linear_silu_and_mul(x, packed)
            assert torch.equal(fused, ops.silu_and_mul(ops.linear(x, packed)))
            assert_close(ops.linear_silu_and_mul(x, weight), fused.double())
        assert torch.equal(ops.linear_silu_and_mul(x.view(2, 65, -1), packed), fused.view(2, 65, -1))
        alone = torch.cat([ops.linear_silu_and_mul(row, packed) for row in x.split(1)])
        assert torch.equal(alone, fused)

    @pytest.mark.parametrize("num_columns", [17, 64])
    def test_grouped_and_batched_products_are_those_of_each_group(self, dtype: torch.dtype, num_columns: int) -> None:
        weight = random(4, 70, num_columns, dtype=dtype)
        packed = ops.pack_weight(weight)
        matrices = [ops.pack_weight(matrix) for matrix in weight]
        sizes = torch.tensor([3, 0, 90, 1])
        x = random(94, 2 * num_columns, dtype=dtype, seed=1)[:, :num_columns]
        expected = [ops.linear(rows, matrix) for rows, matrix in zip(x.split(sizes.tolist()), matrices, strict=True)]
        assert torch.equal(ops.grouped_linear(x, sizes, packed), torch.cat(expected))
        heads = random(40, 4, num_columns, dtype=dtype, seed=2)
        expected = [ops.linear(heads[:, i].contiguous(), matrix) for i, matrix in enumerate(matrices)]
        assert torch.equal(ops.batched_linear(heads, packed), torch.stack(expected, dim=1))

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize(("head_dim", "rotary_dim", "block_size"), [(20, 12, 8), (64, 64, 16)])
    def test_qkv_attention(
        self, dtype: torch.dtype, interleaved: bool, normed: bool, head_dim: int, rotary_dim: int, block_size: int
    ) -> None:
        case = make_case([(5, 37), (1, 140), (3, 3)], 6, 2, head_dim, block_size, num_padding_rows=1).to(dtype)
        positions = torch.tensor([32, 33, 34, 35, 36, 139, 0, 1, 2, 0])
        sequences = [0] * 5 + [1] + [2] * 3
        metadata, slots = case.metadata, torch.full((10,), -1)
        for row, seq in enumerate(sequences):
            block = int(metadata.block_tables[seq, positions[row] // block_size])
            slots[row] = block * block_size + positions[row] % block_size
        metadata = dataclasses.replace(metadata, slot_mapping=slots)
        wide = random(10, 10 * head_dim + 3, dtype=dtype, seed=1)
        qkv, sliding_window = wide[:, 1 : 10 * head_dim + 1], 30
        cos_sin_cache = random(140, rotary_dim, dtype=torch.float32, seed=2)
        norms = [random(head_dim, dtype=dtype, seed=seed) if normed else None for seed in (3, 4)]

        query, key, value = qkv.clone().view(10, 10, head_dim).split((6, 2, 2), dim=1)
        if normed:
            query, key = (ops.rms_norm(x, norm, 1e-5) for x, norm in zip((query, key), norms, strict=True))
        query, key = ops.rotary_embedding(positions, query, key, cos_sin_cache, interleaved)
        caches = [case.key_cache.clone(), case.value_cache.clone()]
        ops.store_kv(key, value, *caches, slots)
        expected = ops.paged_attention(query, *caches, metadata, case.scale, sliding_window)

        tables = (cos_sin_cache, interleaved, *norms, 1e-5, case.key_cache, case.value_cache)
        with pytest.raises(IndexError, match="position"):
            ops.qkv_attention(positions + 1, qkv, *tables, metadata, case.scale, sliding_window)
        outside = dataclasses.replace(metadata, slot_mapping=slots + case.key_cache.shape[0] * block_size)
        with pytest.raises(IndexError, match="slot"):
            ops.qkv_attention(positions, qkv, *tables, outside, case.scale, sliding_window)
        out = ops.qkv_attention(positions, qkv, *tables, metadata, case.scale, sliding_window)
        assert torch.equal(out, expected.flatten(1))
        assert not out.isnan().any()
        for cache, twin in zip((case.key_cache, case.value_cache), caches, strict=True):
            torch.testing.assert_close(cache, twin, rtol=0, atol=0, equal_nan=True)


HEAD_DIMS = [20, 64]  # a matrix unit takes scores of the second
RAGGED = [(1, 1), (1, 300), (5, 37), (140, 140), (1, 0), (20, 140), (0, 9), (3, 129)]


@functools.cache
def ragged_case(
    dtype: torch.dtype, head_dim: int, block_size: int, num_heads: int, num_kv_heads: int, sliding_window: int | None
) -> tuple[AttentionCase, torch.Tensor]:
    """A batch and its attention by rows, computed once for all instruction sets."""
    case = make_case(RAGGED, num_heads, num_kv_heads, head_dim, block_size).to(dtype)
    return case, attention_by_rows(case, sliding_window)


def attend(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    return ops.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window)


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("dtype", DTYPES)
class TestPagedAttention:
    @pytest.mark.parametrize(
        ("head_dim", "block_size", "num_heads", "num_kv_heads", "sliding_window"),
        [
            (2, 16, 2, 2, None),
            (20, 8, 6, 2, 7),
            (32, 1, 4, 4, 1),
            (64, 16, 9, 3, None),
            (96, 8, 8, 1, 200),
            (128, 16, 4, 2, 128),
        ],
    )
    def test_equals_each_row_by_itself(
        self,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        sliding_window: int | None,
    ) -> None:
        case, expected = ragged_case(dtype, head_dim, block_size, num_heads, num_kv_heads, sliding_window)
        out = attend(case, sliding_window)
        assert_close(out, expected)
        twin = reference.paged_attention(
            case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window
        )
        assert_close(out, twin)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("sliding_window", [None, 90])
    def test_a_sequence_does_not_depend_on_the_others(
        self, dtype: torch.dtype, sliding_window: int | None, head_dim: int
    ) -> None:
        """Alone, a long context is split over threads; in a batch it is not."""
        seqlens = [(1, 700), (4, 260), (50, 300), (1, 30), (2, 129)] * 2
        case = make_case(seqlens, head_dim=head_dim, num_padding_rows=0).to(dtype)
        out = attend(case, sliding_window)
        starts = case.metadata.cu_seqlens_q.tolist()
        for seq in range(10):
            rows = slice(starts[seq], starts[seq + 1])
            assert torch.equal(attend(case.select([seq]), sliding_window), out[rows])
        pair = attend(case.select([7, 2]), sliding_window)
        assert torch.equal(pair, torch.cat([out[starts[7] : starts[8]], out[starts[2] : starts[3]]]))

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("sliding_window", [None, 40])
    def test_a_row_does_not_depend_on_how_its_prompt_is_cut(
        self, dtype: torch.dtype, sliding_window: int | None, head_dim: int
    ) -> None:
        """One chunk, chunks of several sizes and single rows: what a verification row must equal."""
        context = 290
        whole = make_case([(context, context)], head_dim=head_dim, num_padding_rows=0).to(dtype)
        expected = attend(whole, sliding_window)
        for size in (1, 3, 5, 64, 127):
            for start in range(0, context, size):
                end = min(start + size, context)
                if size == 1 and start % 7:
                    continue
                part = make_case([(end - start, end)], num_padding_rows=0).metadata
                metadata = type(part)(
                    part.cu_seqlens_q,
                    part.context_lens,
                    whole.metadata.block_tables,
                    part.slot_mapping,
                    end - start,
                    end,
                )
                rows = AttentionCase(whole.query[start:end], whole.key_cache, whole.value_cache, metadata)
                assert torch.equal(attend(rows, sliding_window), expected[start:end])

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_later_tokens_cannot_reach_an_earlier_row(self, dtype: torch.dtype, head_dim: int) -> None:
        """A draft whose key and value are nan spoils its own row and those after it, no other."""
        case = make_case([(6, 40)], head_dim=head_dim, num_padding_rows=0).to(dtype)
        expected = attend(case)
        block, offset = case.metadata.block_tables[0, 37 // 16], 37 % 16
        case.key_cache[block, offset] = torch.nan
        case.value_cache[block, offset] = torch.inf
        out = attend(case)
        assert torch.equal(out[:3], expected[:3])
        assert not out[3:].isfinite().any()

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_takes_slices_and_any_alignment(self, dtype: torch.dtype, head_dim: int) -> None:
        case = make_case([(5, 37), (1, 140)], head_dim=head_dim, num_padding_rows=0).to(dtype)
        expected = attend(case)
        wide = torch.cat([case.query.flatten(1), torch.full((6, 11), torch.nan, dtype=dtype)], dim=1)
        sliced = AttentionCase(
            wide[:, : 6 * head_dim].view(6, 6, head_dim),
            unaligned(case.key_cache),
            unaligned(case.value_cache),
            case.metadata,
        )
        assert torch.equal(attend(sliced), expected)
        strided = AttentionCase(
            case.query.transpose(0, 1).contiguous().transpose(0, 1), case.key_cache, case.value_cache, case.metadata
        )
        assert torch.equal(attend(strided), expected)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_large_scores_do_not_overflow(self, dtype: torch.dtype, head_dim: int) -> None:
        case = make_case([(3, 200)], head_dim=head_dim, num_padding_rows=0).to(dtype)
        loud = AttentionCase(case.query * 200, case.key_cache, case.value_cache, case.metadata)
        # What a score of some hundreds is rounded by, its exponential is wrong by.
        rtol = 1e-3 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(attend(loud).double(), attention_by_rows(loud).double(), rtol=rtol, atol=2e-4)


@pytest.fixture
def _fresh_loading() -> Iterator[None]:
    load_library.cache_clear()
    kernels.ops.select_backend.cache_clear()
    yield
    load_library.cache_clear()
    kernels.ops.select_backend.cache_clear()


@pytest.mark.usefixtures("_fresh_loading")
class TestCompilation:
    def test_without_a_compiler_the_twins_serve_and_it_is_said_once(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        assert not ops.is_available()
        assert not ops.is_available()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "install cc, gcc or clang" in caplog.messages[0]
        assert kernels.ops.select_backend("cpu", torch.bfloat16) is reference
        weight = torch.randn(7, 5).bfloat16()
        assert kernels.ops.pack_weight(weight) is weight

    def test_with_a_compiler_the_kernels_serve(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert kernels.ops.select_backend("cpu", torch.bfloat16) is ops
        assert [path.suffix for path in (tmp_path / "forerun" / "kernels").iterdir()] == [".so"]

    def test_a_failing_compiler_is_quoted(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        compiler = tmp_path / "broken-cc"
        compiler.write_text("#!/bin/sh\necho the disk is full >&2\nexit 3\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        with pytest.raises(CompilationError, match="broken-cc failed on the CPU kernels:\nthe disk is full"):
            build_library(tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert load_library() is None
        assert "the disk is full" in caplog.text

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file where a folder should be")
        with pytest.raises(CompilationError, match=r"could not be written to .*cache"):
            build_library(tmp_path / "cache")

    def test_what_is_compiled_is_kept(self, tmp_path: Path) -> None:
        first = build_library(tmp_path, (("-march=x86-64", "-O0"), ("-O0",)))
        written = first.stat().st_mtime_ns
        assert build_library(tmp_path, (("-march=x86-64", "-O0"), ("-O0",))) == first
        assert first.stat().st_mtime_ns == written

    def test_an_unknown_flag_leads_to_the_next(self, tmp_path: Path) -> None:
        library = Library(build_library(tmp_path, (("-march=no-such-cpu",), ("-O0",))))
        assert library.released is not library.held

    def test_sources_that_fail_for_this_cpu_are_said_to_be_compiled_for_any(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for flags, level in (("-O0",), logging.INFO), ((), logging.WARNING):
            caplog.clear()
            with caplog.at_level(logging.INFO):
                build_library(tmp_path, (("-march=no-such-cpu",), flags))
            assert [record.levelno for record in caplog.records] == [level]
            assert "others failed" in caplog.messages[0]
            assert "no-such-cpu" in caplog.messages[0]

    def test_the_matrix_unit_is_used_where_it_is_granted_and_not_forbidden(self, tmp_path: Path) -> None:
        program = """
import ctypes
from kernels.cpu.library import load_library
is_granted = ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0
print(is_granted, bool(load_library().held.has_amx()))
"""
        compiler = [*(find_compiler() or []), "-march=native", "-dM", "-E", "-"]
        macros = subprocess.run(compiler, input="", capture_output=True, text=True).stdout
        is_built_for_it = "__AMX_BF16__" in macros and "__AVX512BF16__" in macros
        for forbidden in ("0", "1"):
            environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "FORERUN_NO_AMX": forbidden}
            command = [sys.executable, "-c", program]
            answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
            is_granted, has_amx = answer.stdout.split()
            assert has_amx == str(is_built_for_it and is_granted == "True" and forbidden == "0")

    def test_two_processes_may_compile_at_once(self, tmp_path: Path) -> None:
        program = """
import torch
from kernels.cpu import ops
assert ops.is_available()
print(ops.rms_norm(torch.ones(1, 2), torch.ones(2), 0.0))
"""
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert outputs == ["tensor([[1., 1.]])\n"] * 2
        assert [path.suffix for path in (tmp_path / "forerun" / "kernels").iterdir()] == [".so"]
