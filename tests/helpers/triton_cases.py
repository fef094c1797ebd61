"""Triton kernels against their twins; run by test_triton_kernels.py, on a GPU or under Triton's interpreter.

The interpreter is chosen when a kernel is decorated, for a whole process, so this file is no test_*.py.
"""

import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels import (
    cuda_ops,
    grouped_linear,
    latent_attention,
    ops,
    reference,
    rms_norm,
    rotary_embedding,
    scaled_linear,
    silu_and_mul,
    store_kv,
)
from kernels import paged_attention as attention
from kernels import store_latent as latent_store
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import BlockScaledWeight
from models.loader import load_model
from tests.helpers.attention_case import AttentionCase, make_case, ragged_metadata
from tests.helpers.paged_runner import PagedRunner
from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5 if DEVICE == "cuda" else 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on

# A prompt's chunk over several tiles, a decode, a verification, a padding sequence, a whole prompt.
MIXED = [(90, 150), (1, 23), (5, 70), (1, 0), (3, 3)]
# What fits one tile each, over several splits of the keys.
SHORT = [(5, 1100), (1, 513), (1, 0), (3, 512), (2, 40)]


@pytest.fixture(autouse=True)
def _bfloat16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16 and multiplies the bits (triton-lang/triton issue 11584)."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda builder, a, b, *rest: create_dot(builder, widened(a), widened(b), *rest),
    )


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows as nan."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def attend(case: AttentionCase, sliding_window: int | None = None, spread: bool | None = None) -> torch.Tensor:
    inputs = case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window
    return attention.paged_attention(*inputs) if spread is None else attention.launch_attention(*inputs, spread)


def attend_twin(case: AttentionCase, sliding_window: int | None = None) -> torch.Tensor:
    return reference.paged_attention(
        case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window
    )


@pytest.mark.parametrize(
    ("dtype", "sliding_window", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (torch.float32, None, 9, 3, 64, 16),
        (torch.float32, 7, 4, 4, 20, 3),
        (torch.float32, 70, 7, 1, 128, 32),
        (torch.float16, None, 4, 4, 20, 3),
        (torch.bfloat16, None, 7, 1, 128, 32),
        (torch.bfloat16, 7, 9, 3, 64, 16),
    ],
)
def test_a_mixed_batch(
    dtype: torch.dtype, sliding_window: int | None, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make_case(MIXED, num_heads, num_kv_heads, head_dim, block_size, device=DEVICE).to(dtype)
    assert_close(attend(case, sliding_window), attend_twin(case, sliding_window))


@pytest.mark.parametrize(
    ("dtype", "sliding_window"),
    [(torch.float32, None), (torch.float32, 300), (torch.float32, 600), (torch.bfloat16, None)],
)
@pytest.mark.parametrize("spread", [False, True])
def test_keys_in_several_splits(dtype: torch.dtype, sliding_window: int | None, spread: bool) -> None:
    case = make_case(SHORT, 6, 2, 40, device=DEVICE).to(dtype)
    assert_close(attend(case, sliding_window, spread), attend_twin(case, sliding_window))


@pytest.mark.parametrize("sliding_window", [None, 300])
def test_splits_sum_alike_in_one_program_or_in_many(sliding_window: int | None) -> None:
    case = make_case(SHORT, 3, 1, 40, device=DEVICE)
    assert torch.equal(attend(case, sliding_window, spread=False), attend(case, sliding_window, spread=True))


@pytest.mark.parametrize("sliding_window", [None, 100])
def test_a_sequence_gets_the_same_bits_in_any_batch(sliding_window: int | None) -> None:
    seqlens = [(70, 90), (5, 1100), (1, 0), (1, 513), (2, 40)]
    case = make_case(seqlens, 3, 1, 40, num_padding_rows=0, device=DEVICE)
    together = attend(case, sliding_window).split([queries for queries, _ in seqlens])
    for seqs in ([0], [1], [4, 3, 2], [3] * 9):
        expected = torch.cat([together[seq] for seq in seqs])
        assert torch.equal(attend(case.select(seqs), sliding_window), expected), seqs


@pytest.mark.parametrize(("context", "sliding_window"), [(70, None), (66, None), (1100, None), (132, 64)])
def test_a_verification_gives_the_bits_of_decodes_one_by_one(context: int, sliding_window: int | None) -> None:
    case = make_case([(5, context)], 3, 1, 40, num_padding_rows=0, device=DEVICE)
    verified = attend(case, sliding_window)
    for row in range(5):
        decode = make_case([(1, context)], 3, 1, 40, num_padding_rows=0, device=DEVICE)
        metadata = decode.metadata
        metadata.context_lens.fill_(context - 4 + row)
        metadata.block_tables.copy_(case.metadata.block_tables)
        one = AttentionCase(case.query[row : row + 1], case.key_cache, case.value_cache, metadata)
        assert torch.equal(attend(one, sliding_window), verified[row : row + 1]), row


def test_queries_of_a_wider_projection() -> None:
    case = make_case(MIXED, 6, 2, 20, device=DEVICE)
    projection = randn(len(case.query), 10, 20, dtype=torch.float32)
    projection[:, :6] = case.query
    view = AttentionCase(projection[:, :6], case.key_cache, case.value_cache, case.metadata)
    assert torch.equal(attend(view), attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 7), (8, 128), (5, 256)])
def test_store_kv(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    """D11: slot -1 leaves the canary in the last slot of the last block alone."""
    num_blocks, block_size = 5, 3
    projection = randn(6, 2 * num_heads, head_dim, dtype=dtype)
    key, value = projection[:, :num_heads], projection[:, num_heads:]
    slot_mapping = torch.tensor([13, -1, 0, 7, -1, 5], device=DEVICE)
    pools = [
        torch.full((num_blocks, block_size, num_heads, head_dim), 77.0, dtype=dtype, device=DEVICE) for _ in range(4)
    ]
    store_kv.store_kv(key, value, pools[0], pools[1], slot_mapping)
    reference.store_kv(key, value, pools[2], pools[3], slot_mapping)
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])
    assert (pools[0][-1, -1] == 77).all()


def far_pool() -> torch.Tensor:
    """A pool [9, 2, 1, 16] of zeros whose last block lies past 2^31 entries; only what is touched takes memory."""
    stride = 2**31 // 8 + 16
    num_entries = 8 * stride + 32
    if DEVICE == "cuda":
        memory = torch.zeros(num_entries, dtype=torch.float16, device=DEVICE)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, 2 * num_entries, flags=flags), dtype=torch.float16)
    return memory.as_strided((9, 2, 1, 16), (stride, 16, 16, 1))


def test_addresses_past_two_to_the_thirty_first() -> None:
    key_cache, value_cache = far_pool(), far_pool()
    rows = randn(2, 1, 16, dtype=torch.float16)
    store_kv.store_kv(rows, 2 * rows, key_cache, value_cache, torch.tensor([16, 17], device=DEVICE))
    assert torch.equal(key_cache[8, :, 0], rows[:, 0])
    assert torch.equal(value_cache[8, :, 0], 2 * rows[:, 0])
    assert not key_cache[:8].any()
    metadata = ragged_metadata(
        [1], torch.tensor([2], dtype=torch.int32), torch.tensor([[8]], dtype=torch.int32), DEVICE
    )
    case = AttentionCase(randn(1, 3, 16, dtype=torch.float16), key_cache, value_cache, metadata)
    assert_close(attend(case), attend_twin(case))


def latent_case(
    seqlens: list[tuple[int, int]], num_heads: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, a cache of latents with one KV head, and the layout."""
    case = make_case(seqlens, num_heads, 1, width, block_size=16, device=DEVICE).to(dtype)
    return case.query, case.key_cache[:, :, 0], case.metadata


@pytest.mark.parametrize(
    ("dtype", "num_heads", "width", "value_dim"),
    [(torch.float32, 3, 40, 32), (torch.float32, 20, 25, 20), (torch.bfloat16, 16, 72, 64), (torch.float16, 5, 40, 32)],
)
@pytest.mark.parametrize("spread", [False, True])
def test_latent_attention(dtype: torch.dtype, num_heads: int, width: int, value_dim: int, spread: bool) -> None:
    """Heads of a query may fill several tiles, or a tile hold several queries; contexts of one split and of three."""
    query, cache, metadata = latent_case([(9, 30), (1, 0), (1, 1100), (5, 515), (3, 3)], num_heads, width, dtype)
    actual = latent_attention.launch_latent_attention(query, cache, metadata, 0.2, value_dim, spread)
    assert_close(actual, reference.latent_attention(query, cache, metadata, 0.2, value_dim))


def test_latent_attention_sums_alike_in_one_program_or_in_many() -> None:
    query, cache, metadata = latent_case([(5, 1100), (1, 513), (1, 0), (3, 512)], 3, 40, torch.float32)
    spread = latent_attention.launch_latent_attention(query, cache, metadata, 0.2, 32, spread=True)
    assert torch.equal(latent_attention.launch_latent_attention(query, cache, metadata, 0.2, 32, spread=False), spread)
    assert torch.equal(latent_attention.latent_attention(query, cache, metadata, 0.2, 32), spread)


def test_a_verification_of_latents_gives_the_bits_of_decodes_one_by_one() -> None:
    query, cache, metadata = latent_case([(5, 515)], 3, 40, torch.float32)
    verified = latent_attention.latent_attention(query, cache, metadata, 0.2, 32)
    for row in range(5):
        context_lens = torch.tensor([511 + row], dtype=torch.int32)
        one = ragged_metadata([1], context_lens, metadata.block_tables, DEVICE)
        decoded = latent_attention.latent_attention(query[row : row + 1], cache, one, 0.2, 32)
        assert torch.equal(decoded[0], verified[row]), row


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_latent(dtype: torch.dtype) -> None:
    projection, slots = randn(6, 60, dtype=dtype), torch.tensor([13, -1, 0, 7, -1, 5], device=DEVICE)
    pools = [torch.full((5, 3, 41), 77.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    latent_store.store_latent(projection[:, 7:48], pools[0], slots)
    reference.store_latent(projection[:, 7:48], pools[1], slots)
    assert torch.equal(pools[0], pools[1])
    assert (pools[0][-1, -1] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize(
    "sizes", [[0, 3, 0, 0, 1, 0], [64, 0, 65, 1, 0, 0], [0, 0, 0, 0, 0, 130], [1, 1, 1, 1, 1, 1], [0] * 6]
)
def test_grouped_linear(dtype: torch.dtype, out_dtype: torch.dtype | None, sizes: list[int]) -> None:
    x, weight = randn(sum(sizes), 80, dtype=dtype)[:, :70], randn(6, 90, 70, dtype=dtype) / 8
    group_sizes = torch.tensor(sizes, device=DEVICE)
    actual = grouped_linear.grouped_linear(x, group_sizes, weight, out_dtype)
    expected = reference.grouped_linear(x, group_sizes, weight, out_dtype)
    assert actual.dtype == (out_dtype or dtype)
    assert_close(actual, expected)


def scaled_weight(*shape: int, dtype: torch.dtype) -> BlockScaledWeight:
    """FP8 in blocks of 20 x 64, the last of them cut short."""
    blocks = (*shape[:-2], -(-shape[-2] // 20), -(-shape[-1] // 64))
    scale = randn(*blocks, dtype=torch.float32).abs() / 8
    return BlockScaledWeight(randn(*shape, dtype=torch.float32).to(torch.float8_e4m3fn), scale, (20, 64), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 70])
def test_scaled_linear(dtype: torch.dtype, num_rows: int) -> None:
    x, weight, bias = (
        randn(num_rows, 160, dtype=dtype)[:, :150],
        scaled_weight(90, 150, dtype=dtype),
        randn(90, dtype=dtype),
    )
    for out_dtype in (None, torch.float32):
        expected = reference.linear(x.float(), replace(weight, dtype=torch.float32), bias.float())
        actual = scaled_linear.scaled_linear(x, weight, bias, out_dtype)
        assert_close(actual, expected.to(actual.dtype))
    assert torch.equal(
        scaled_linear.scaled_linear(x.unflatten(0, (1, -1)), weight)[0], scaled_linear.scaled_linear(x, weight)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear_with_scales(dtype: torch.dtype) -> None:
    x, weight = randn(70, 150, dtype=dtype), scaled_weight(4, 90, 150, dtype=dtype)
    sizes = torch.tensor([0, 65, 0, 5], device=DEVICE)
    expected = reference.grouped_linear(x.float(), sizes, replace(weight, dtype=torch.float32))
    assert_close(grouped_linear.grouped_linear(x, sizes, weight, torch.float32), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(3, 33), (5, 576), (2, 4100), (4, 3, 64), (7,)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    assert_close(rms_norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_where_they_stand() -> None:
    projection, weight = randn(4, 9, 33, dtype=torch.float32), randn(33, dtype=torch.float32)
    heads = projection[:, 2:7]
    assert_close(rms_norm.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 33), (5, 576)])
def test_add_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), 30 * randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    expected, expected_residual = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    normed, new_residual = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(normed, expected)
    assert_close(new_residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (20, 12), (6, 2)])
def test_rotary_embedding(dtype: torch.dtype, interleaved: bool, head_dim: int, rotary_dim: int) -> None:
    projection = randn(5, 15, head_dim, dtype=dtype)  # 9 query heads, 3 key heads, 3 of values
    untouched = projection[:, 12:].clone()
    query, key = projection[:, :9], projection[:, 9:12]
    angles = randn(40, rotary_dim // 2, dtype=torch.float32)
    cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([0, 39, 3, 3, 17], device=DEVICE)
    expected = reference.rotary_embedding(positions, query.clone(), key.clone(), cache, interleaved)
    rotated = rotary_embedding.rotary_embedding(positions, query, key, cache, interleaved)
    assert_close(rotated[0], expected[0])
    assert_close(rotated[1], expected[1])
    assert torch.equal(projection[:, 12:], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1536, 1025])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = 4 * randn(3, 2 * width, dtype=dtype)
    assert_close(silu_and_mul.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_the_kernels_run_where_they_should() -> None:
    interpreted = isinstance(attention._attention_kernel, interpreter.InterpretedFunction)
    assert interpreted == (DEVICE == "cpu")


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "deepseek_v3_no_q_lora"])
def test_a_whole_model_on_these_kernels(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a batch of a decode and a prompt long enough for the naive form, a verification."""
    folder = make_tiny_checkpoint(tmp_path, architecture, with_tokenizer=False)
    prompt = torch.arange(50).mul(37).remainder(VOCAB_SIZE).tolist()
    steps = [{0: prompt[:5]}, {0: prompt[5:6], 1: prompt[:30]}, {1: prompt[30:34], 0: prompt[6:9]}]
    logits = []
    for backend in (reference, cuda_ops):
        monkeypatch.setattr(ops, "select_backend", lambda device_type, dtype, backend=backend: backend)
        if DEVICE == "cpu":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        model = load_model(folder, torch.float32, torch.device(DEVICE), progress=False)
        runner = PagedRunner(model, device=DEVICE)
        logits.append([runner.step(step) for step in steps])
    for expected, actual in zip(*logits, strict=True):
        for seq, rows in expected.items():
            torch.testing.assert_close(actual[seq], rows, atol=1e-4, rtol=1e-4)
