"""Torch twin of paged attention.

Sequences with about as many queries and about as many blocks are gathered together, padded to the
longest of them, so that a step of decodes or verifications is a few large operators and a prompt's
chunk is a matmul of its own.
"""

from collections import defaultdict

import torch

from kernels.metadata import AttentionMetadata

# fp32 scores held at once; a long chunk is taken a slice of queries at a time.
MAX_SCORES = 1 << 26


def paged_attention(
    query: torch.Tensor,  # [T, num_heads, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, E]; E is D but for latents
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [T, num_heads, E]
    """Causal softmax(scale * query key^T) value over the blocks of every sequence.

    With a sliding window of w, a row sees its own position and the w - 1 before it. Rows of a sequence
    with context_len 0, and rows past the last sequence, come out as zeros.
    """
    out = query.new_zeros((*query.shape[:2], value_cache.shape[3]))
    starts = metadata.cu_seqlens_q.tolist()
    context_lens = metadata.context_lens.tolist()
    for seqs in _alike(starts, context_lens, key_cache.shape[1]):
        num_queries = [starts[seq + 1] - starts[seq] for seq in seqs]
        max_queries, max_context = max(num_queries), max(context_lens[seq] for seq in seqs)
        first_rows = torch.tensor([starts[seq] for seq in seqs], device=query.device)[:, None]
        counts = torch.tensor(num_queries, device=query.device)[:, None]
        lens = torch.tensor([context_lens[seq] for seq in seqs], device=query.device)[:, None]

        num_blocks = -(-max_context // key_cache.shape[1])
        blocks = metadata.block_tables[seqs, :num_blocks].long()
        inside = torch.arange(max_context, device=query.device) < lens  # [S, L]
        keys = _gather(key_cache, blocks, max_context)
        # What lies beyond a context has weight 0, but 0 * nan would still be nan.
        values = _gather(value_cache, blocks, max_context).masked_fill(~inside[:, None, :, None], 0)

        step = max(1, MAX_SCORES // (len(seqs) * query.shape[1] * max_context))
        for start in range(0, max_queries, step):
            index = torch.arange(start, min(start + step, max_queries), device=query.device)[None]
            real = index < counts  # [S, Q]
            rows = torch.where(real, first_rows + index, first_rows)
            positions = lens - counts + index
            attended = _attend(query[rows], keys, values, positions, scale, sliding_window)
            out[rows[real]] = attended[real].to(out.dtype)
    return out


def _alike(starts: list[int], context_lens: list[int], block_size: int) -> list[list[int]]:
    """Sequences with rows and a context, grouped by the powers of two that hold their queries and blocks."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for seq, context_len in enumerate(context_lens):
        num_queries = starts[seq + 1] - starts[seq]
        if num_queries > 0 and context_len > 0:
            num_blocks = -(-context_len // block_size)
            groups[(num_queries - 1).bit_length(), (num_blocks - 1).bit_length()].append(seq)
    return list(groups.values())


def _gather(cache: torch.Tensor, blocks: torch.Tensor, max_context: int) -> torch.Tensor:
    """[num_blocks, block_size, num_kv_heads, D] at blocks [S, B] -> fp32 [S, num_kv_heads, max_context, D]."""
    return cache[blocks].flatten(1, 2)[:, :max_context].transpose(1, 2).float()


def _attend(
    query: torch.Tensor,  # [S, Q, num_heads, D]
    keys: torch.Tensor,  # [S, num_kv_heads, L, D] fp32
    values: torch.Tensor,  # [S, num_kv_heads, L, E] fp32
    positions: torch.Tensor,  # [S, Q]
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:  # [S, Q, num_heads, E] fp32
    num_seqs, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, max_context = keys.shape[1:3]
    group = num_heads // num_kv_heads
    # The heads that share a KV head become rows of one matmul, so that keys are not repeated.
    grouped = query.float().view(num_seqs, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(num_seqs, num_kv_heads, group * num_queries, head_dim) @ keys.transpose(2, 3)
    scores = scores.view(num_seqs, num_kv_heads, group, num_queries, max_context) * scale

    key_positions = torch.arange(max_context, device=query.device)
    seen = key_positions <= positions[..., None]  # [S, Q, L]
    if sliding_window is not None:
        seen &= key_positions > positions[..., None] - sliding_window
    scores = scores.masked_fill_(~seen[:, None, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill_(~seen[:, None, None], 0)  # a row that sees nothing: nan -> 0
    attended = weights.view(num_seqs, num_kv_heads, group * num_queries, max_context) @ values
    attended = attended.view(num_seqs, num_kv_heads, group, num_queries, -1)
    return attended.permute(0, 3, 1, 2, 4).reshape(num_seqs, num_queries, num_heads, -1)
