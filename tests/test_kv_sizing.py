"""The pool shrinks with drafts and drafters, and what cannot fit is refused."""

from dataclasses import replace

import pytest

from app.engine.kv_sizing import StepShape, plan_num_blocks

SHAPE = StepShape(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=4096,
    num_speculative_tokens=0,
    vocab_size=128_000,
    hidden_size=4096,
    soft_drafts=False,
)
GIB = 2**30


def num_blocks(shape: StepShape, block_bytes: int = 2**21) -> int:
    return plan_num_blocks(None, 16 * GIB, block_bytes, 16, shape)


def test_blocks_fall_with_every_draft_and_with_a_drafter():
    """D12: verification's logits and the drafter's KV are part of the plan."""
    counts = [num_blocks(replace(SHAPE, num_speculative_tokens=k)) for k in range(8)]
    assert counts == sorted(set(counts), reverse=True)
    assert num_blocks(replace(SHAPE, num_speculative_tokens=4, soft_drafts=True)) < counts[4]
    assert num_blocks(SHAPE, block_bytes=2**21 + 2**19) < counts[0]


def test_auto_takes_no_more_than_every_sequence_needs():
    small = replace(SHAPE, max_num_seqs=2, max_model_len=160)
    assert num_blocks(small) == 2 * 10


def test_asked_for_bytes_are_taken_whole():
    assert plan_num_blocks(GIB, 4 * GIB, 2**20, 16, SHAPE) == 1024


@pytest.mark.parametrize(
    ("memory", "available", "message"),
    [
        (2**28, 4 * GIB, "lower max_model_len to 4080"),
        (8 * GIB, 4 * GIB, "only 4096 MiB are free"),
        (None, 0, "free memory"),
        (10, GIB, "raise kv_cache_memory$"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_remedy(memory, available, message):
    shape = replace(SHAPE, max_model_len=4081) if memory == 2**28 else SHAPE
    block_bytes = 2**28 // 255 if memory == 2**28 else 2**20
    with pytest.raises(ValueError, match=message):
        plan_num_blocks(memory, available, block_bytes, 16, shape)
