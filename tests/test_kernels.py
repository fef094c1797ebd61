"""The torch twins against formulas written out, the choice of kernels, and the call of vllm-flash-attn."""

import importlib.util
import inspect
import logging
import sys
import types

import pytest
import torch

from kernels import flash_attention, ops, reference, reference_attention, reference_linear
from kernels.metadata import AttentionMetadata
from tests.helpers.attention_case import AttentionCase, attention_by_rows, make_case

# A prompt's chunk, a decode, a verification, a padding sequence, a whole prompt.
MIXED = [(37, 50), (1, 23), (5, 70), (1, 0), (3, 3)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is published for Linux on x86-64 only"
)


def attend(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    return reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 1, 7])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), [(6, 2, 20, 16), (4, 4, 7, 3)])
def test_paged_attention_is_attention_row_by_row(
    dtype: torch.dtype, sliding_window: int | None, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make_case(MIXED, num_heads, num_kv_heads, head_dim, block_size).to(dtype)
    out = attend(case, sliding_window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), attention_by_rows(case, sliding_window), atol=TOLERANCE[dtype], rtol=0.01)


def test_rows_without_a_context_are_zero() -> None:
    case = make_case(MIXED, num_padding_rows=2)
    out = attend(case)
    padding_sequence = int(case.metadata.cu_seqlens_q[3])
    assert (out[[padding_sequence, -2, -1]] == 0).all()


def test_a_long_chunk_taken_in_slices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MIXED)
    whole = attend(case, 30)
    monkeypatch.setattr(reference_attention, "MAX_SCORES", 6 * 50 * 4)
    torch.testing.assert_close(attend(case, 30), whole)


def test_a_step_of_decodes_is_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = []
    gather = reference_attention._gather
    monkeypatch.setattr(reference_attention, "_gather", lambda *args: gathers.append(args) or gather(*args))
    attend(make_case([(1, 33), (1, 40), (1, 60), (1, 47)]))
    assert len(gathers) == 2  # keys, values


def test_store_kv_writes_its_slots_and_nothing_else() -> None:
    """D11: a slot of -1 must not wrap round to the last slot of the pool."""
    num_blocks, block_size, shape = 5, 3, (2, 7)
    key_cache = torch.full((num_blocks, block_size, *shape), torch.nan)
    value_cache = torch.full((num_blocks, block_size, *shape), torch.nan)
    key, value = torch.randn(4, *shape), torch.randn(4, *shape)
    slots = [13, -1, 0, 7]
    reference.store_kv(key, value, key_cache, value_cache, torch.tensor(slots))
    for cache, rows in ((key_cache.flatten(0, 1), key), (value_cache.flatten(0, 1), value)):
        torch.testing.assert_close(cache[[13, 0, 7]], rows[[0, 2, 3]], rtol=0, atol=0)
        untouched = [slot for slot in range(num_blocks * block_size) if slot not in slots]
        assert cache[untouched].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_over_the_last_dimension(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 4, 33).to(dtype), torch.randn(33).to(dtype)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    normed = reference.rms_norm(x, weight, 1e-3)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, atol=TOLERANCE[dtype], rtol=0.01)


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    x, residual = torch.randn(5, 33).bfloat16(), 100 * torch.randn(5, 33).bfloat16()
    weight, total = torch.randn(33).bfloat16(), residual + x
    normed, new_residual = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-5))


def test_silu_and_mul_gates_the_second_half() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(reference.silu_and_mul(torch.cat((gate, up), dim=1)), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    num_tokens, head_dim, rotary_dim = 4, 10, 6
    positions = torch.tensor([0, 5, 2, 30])
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.3, 0.05])
    cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    query, key = torch.randn(num_tokens, 3, head_dim), torch.randn(num_tokens, 1, head_dim)

    def turned(x: torch.Tensor) -> torch.Tensor:
        if interleaved:
            pairs = torch.complex(x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2])
        else:
            pairs = torch.complex(x[..., :3], x[..., 3:rotary_dim])
        pairs = pairs * torch.polar(torch.ones(4, 1, 3), angles[positions][:, None])
        result = x.clone()
        if interleaved:
            result[..., 0:rotary_dim:2], result[..., 1:rotary_dim:2] = pairs.real, pairs.imag
        else:
            result[..., :3], result[..., 3:rotary_dim] = pairs.real, pairs.imag
        return result

    expected = turned(query), turned(key)
    torch.testing.assert_close(reference.rotary_embedding(positions, query, key, cache, interleaved), expected)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_into_a_wider_dtype_is_not_rounded_on_the_way(monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    monkeypatch.setattr(reference_linear, "WIDENED_ROWS", 8)  # several slices, the last one short
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(21, 40).bfloat16()
    bias = torch.randn(21).bfloat16() if with_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    out = reference.linear(x, weight, bias, torch.float32)
    torch.testing.assert_close(out, expected.float(), atol=1e-4, rtol=1e-5)
    assert reference.linear(x, weight, bias).dtype == torch.bfloat16


def test_joined_norms_stand_side_by_side_and_position_0_has_zeros_for_its_first() -> None:
    x, second, weight, second_weight = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4), torch.randn(4)
    positions = torch.tensor([2, 0, 1])
    joined = ops.join_norms(x, weight, second, second_weight, 1e-5, positions, second_leads=False)
    first, last = joined.chunk(2, dim=1)
    torch.testing.assert_close(first[[0, 2]], reference.rms_norm(x[[0, 2]], weight, 1e-5))
    assert torch.equal(first[1], torch.zeros(4))
    torch.testing.assert_close(last, reference.rms_norm(second, second_weight, 1e-5))
    turned = ops.join_norms(x, weight, second, second_weight, 1e-5, positions, second_leads=True)
    assert torch.equal(turned, torch.cat((last, first), dim=1))


def test_embedding_reads_rows_and_refuses_ids_outside() -> None:
    weight = torch.randn(9, 4)
    assert torch.equal(reference.embedding(torch.tensor([8, 0]), weight), weight[[8, 0]])
    with pytest.raises(IndexError):
        reference.embedding(torch.tensor([-1]), weight)


OPERATORS = [
    "add_rms_norm",
    "embedding",
    "linear",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv",
]


def assert_serves_every_operator(backend: types.ModuleType) -> None:
    for name in OPERATORS:
        expected = inspect.signature(getattr(ops, name)).parameters
        offered = inspect.signature(getattr(backend, name)).parameters
        assert list(offered) == list(expected), f"{backend.__name__}.{name}"
        assert all(offered[p].default == expected[p].default for p in expected), f"{backend.__name__}.{name}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_backend_of_every_dtype_serves_every_operator(dtype: torch.dtype) -> None:
    assert_serves_every_operator(ops.select_backend("cpu", dtype))


@needs_triton
def test_the_cuda_backend_serves_every_operator() -> None:
    backend = ops.select_backend("cuda", torch.bfloat16)
    assert backend.__name__ == "kernels.cuda_ops"
    assert_serves_every_operator(backend)


def test_half_precision_on_a_cpu_is_left_to_torch_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ops.select_backend.cache_clear()
    with caplog.at_level(logging.INFO, logger="kernels.ops"):
        x = torch.randn(2, 6, dtype=torch.float16)
        first = ops.silu_and_mul(x)
        ops.silu_and_mul(x)
    assert torch.equal(first, reference.silu_and_mul(x))
    assert caplog.messages == ["kernels for torch.float16 on cpu: kernels.reference"]


def windowed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:
    """What the package documents: keys from i - left to i + right, i aligned to the end of the keys."""
    assert causal
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    window = None if window_size == (-1, -1) else window_size[0] + 1
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=block_table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_seqlen_q=int(cu_seqlens_q.diff().max()),
        max_context_len=int(context_lens.max()),
    )
    case = AttentionCase(q, k, v, metadata)
    assert softmax_scale == case.scale
    return attention_by_rows(case, window).to(q.dtype)


def maintained_flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, softmax_scale=None,
    causal=False, window_size=None, block_table=None,
):  # fmt: skip
    """The signature of vLLM's own copy."""
    assert cu_seqlens_k is None
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(seqused_k.max()))
    return windowed(q, k, v, cu_seqlens_q, seqused_k, softmax_scale, causal, window_size, block_table)


def wheel_flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), block_table=None,
):  # fmt: skip
    """The signature of the wheel 2.6.2."""
    assert cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_k[0] == 0
    return windowed(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), softmax_scale, causal, window_size, block_table)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Puts a module of a name and function in place of the package; the choice is made anew."""

    def put(name: str, function) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:end]))
            module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        sys.modules[name].flash_attn_varlen_func = function

    flash_attention.find_flash_attention.cache_clear()
    yield put
    flash_attention.find_flash_attention.cache_clear()


@pytest.mark.parametrize(
    ("package", "function"),
    [
        ("vllm_flash_attn", wheel_flash_attn_varlen_func),
        ("vllm.vllm_flash_attn", maintained_flash_attn_varlen_func),
    ],
)
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_either_build_of_flash_attention_is_called_by_its_signature(
    install, package: str, function, sliding_window: int | None
) -> None:
    install(package, function)
    found = flash_attention.find_flash_attention()
    assert found is function
    case = make_case(MIXED, num_padding_rows=0)
    out = flash_attention.flash_attention(
        found, case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window
    )
    torch.testing.assert_close(out, attend(case, sliding_window))


def test_flash_attention_that_is_not_installed_is_not_found(install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "PACKAGES", ("absent_flash_attn", "absent.flash_attn"))
    assert flash_attention.find_flash_attention() is None


def test_flash_attention_that_does_not_load_is_said_and_left(
    install, caplog: pytest.LogCaptureFixture, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm_flash_attn.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attention.find_flash_attention() is None
    assert "undefined symbol" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "capability", "expected"),
    [
        (torch.bfloat16, 128, 16, (9, 0), True),
        (torch.float16, 256, 64, (8, 0), True),
        (torch.float32, 128, 16, (9, 0), False),
        (torch.bfloat16, 100, 16, (9, 0), False),
        (torch.bfloat16, 264, 16, (9, 0), False),
        (torch.bfloat16, 128, 24, (9, 0), False),
        (torch.bfloat16, 128, 16, (7, 5), False),
    ],
)
def test_flash_attention_serves_only_what_it_can(
    dtype: torch.dtype, head_dim: int, block_size: int, capability: tuple[int, int], expected: bool
) -> None:
    assert flash_attention.fits(dtype, head_dim, block_size, capability) is expected


@needs_triton
@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, "flash"), (torch.float32, "triton")])
def test_cuda_attention_goes_to_flash_attention_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, expected: str
) -> None:
    from kernels import cuda_ops

    def answer(name: str, *arguments: object) -> str:
        assert arguments[-2:] == (case.scale, 7)
        return name

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attention, "find_flash_attention", lambda: wheel_flash_attn_varlen_func)
    monkeypatch.setattr(flash_attention, "flash_attention", lambda *arguments: answer("flash", *arguments))
    monkeypatch.setattr(cuda_ops.triton_attention, "paged_attention", lambda *arguments: answer("triton", *arguments))
    case = make_case(MIXED, head_dim=64).to(dtype)
    served = cuda_ops.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, case.scale, 7)
    assert served == expected


@needs_triton
@pytest.mark.parametrize("with_bias", [False, True])
def test_cuda_linear_takes_wide_sums_from_the_product(monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    from kernels import cuda_ops

    # torch has this overload for CUDA only.
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, weight = torch.randn(2, 3, 40).bfloat16(), torch.randn(21, 40).bfloat16()
    bias = torch.randn(21).bfloat16() if with_bias else None
    out = cuda_ops.linear(x, weight, bias, torch.float32)
    torch.testing.assert_close(out, reference.linear(x, weight, bias, torch.float32))
    assert cuda_ops.linear(x, weight, bias).dtype == torch.bfloat16
