"""Measures the compiled CPU kernels against torch, kernel by kernel.

    python benchmarks/bench_kernels.py --rows 1 8 32 --dtype bfloat16

Shapes are those of SmolLM2-135M; every layer has matrices and caches of its own, so that none stays in a CPU cache
from one pass to the next. Ours and torch's run alternately; figures are medians of the rounds, ratios medians of the
ratios within a round, and `best` is the fastest round of ours, which other load on the machine disturbs least.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional

from benchmarks.machine import read_bandwidth, this_machine
from benchmarks.report import format_table, median, number, paired_ratio, print_header, print_json
from kernels import reference
from kernels.cpu import ops
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import PackedWeight

NUM_LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
MATRICES = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
ATTENTION_CASES = [(1, 1, 200), (1, 1, 1000), (1, 5, 200), (8, 1, 200), (32, 1, 200), (32, 5, 200), (1, 512, 512)]


@dataclass(frozen=True)
class Timing:
    """Seconds of ours and torch's, round by round, and what a call moves and computes."""

    kernel: str
    case: str
    ours: list[float]
    theirs: list[float]
    num_bytes: int
    num_flops: int

    def row(self) -> list[str]:
        middle, best = median(self.ours), min(self.ours)
        assert middle is not None
        return [
            self.kernel,
            self.case,
            number(1e3 * middle, 3),
            number(1e3 * best, 3),
            number(self.num_bytes / best / 1e9, 1),
            number(self.num_flops / best / 1e9, 0),
            number(1e3 * (median(self.theirs) or 0), 3),
            number(paired_ratio(self.theirs, self.ours), 2),
        ]

    def result(self) -> dict[str, Any]:
        best = min(self.ours)
        return {
            "kernel": self.kernel,
            "case": self.case,
            "median_ms": 1e3 * (median(self.ours) or 0),
            "best_ms": 1e3 * best,
            "best_bytes_per_s": self.num_bytes / best,
            "best_flops_per_s": self.num_flops / best,
            "torch_median_ms": 1e3 * (median(self.theirs) or 0),
            "speedup": paired_ratio(self.theirs, self.ours),
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 512], help="tokens of a call")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--num-layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--num-threads", type=int, help="default: all cores")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the last line to a file, too")
    return parser.parse_args(arguments)


def alternate(
    kernel: str,
    case: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int,
    num_bytes: int,
    num_flops: int,
) -> Timing:
    times: tuple[list[float], list[float]] = ([], [])
    ours(), theirs()
    for _ in range(repeats):
        for call, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return Timing(kernel, case, *times, num_bytes, num_flops)


class LinearBenchmark:
    """All matrix products of a step: every layer's, then the logits in fp32."""

    def __init__(self, dtype: torch.dtype, num_layers: int) -> None:
        shapes = MATRICES * num_layers + [(VOCABULARY, HIDDEN)]
        self.weights = [torch.randn(shape).to(dtype) for shape in shapes]
        self.packed: list[PackedWeight] = [ops.pack_weight(weight) for weight in self.weights]

    def measure(self, num_rows: int, repeats: int) -> Timing:
        dtype = self.weights[0].dtype
        inputs = {width: torch.randn(num_rows, width).to(dtype) for width in (HIDDEN, INTERMEDIATE)}

        def ours() -> None:
            for weight in self.packed[:-1]:
                ops.linear(inputs[weight.num_columns], weight)
            ops.linear(inputs[HIDDEN], self.packed[-1], out_dtype=torch.float32)

        def theirs() -> None:
            for weight in self.weights[:-1]:
                functional.linear(inputs[weight.shape[1]], weight)
            functional.linear(inputs[HIDDEN], self.weights[-1]).float()

        count = sum(weight.numel() for weight in self.weights)
        num_bytes, num_flops = count * dtype.itemsize, 2 * num_rows * count
        return alternate("linear, whole step", f"{num_rows} rows", ours, theirs, repeats, num_bytes, num_flops)


def measure_attention(
    num_seqs: int, num_queries: int, context: int, dtype: torch.dtype, num_layers: int, repeats: int
) -> Timing:
    """Every layer's attention over scattered blocks; the twin gathers keys and values first."""
    num_blocks = -(-context // BLOCK_SIZE)
    cache_shape = (num_seqs * num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = [[torch.randn(cache_shape).to(dtype) for _ in range(2)] for _ in range(num_layers)]
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries,
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        block_tables=torch.randperm(num_seqs * num_blocks).view(num_seqs, num_blocks).int(),
        slot_mapping=torch.full((num_seqs * num_queries,), -1),
        max_seqlen_q=num_queries,
        max_context_len=context,
    )
    query = torch.randn(num_seqs * num_queries, NUM_HEADS, HEAD_DIM).to(dtype)
    scale = HEAD_DIM**-0.5

    def attend(attention: Callable[..., torch.Tensor]) -> None:
        for key_cache, value_cache in caches:
            attention(query, key_cache, value_cache, metadata, scale)

    scores = num_layers * num_seqs * NUM_HEADS * sum(range(context - num_queries + 1, context + 1))
    return alternate(
        "attention, all layers",
        f"{num_seqs} x {num_queries} rows over {context}",
        lambda: attend(ops.paged_attention),
        lambda: attend(reference.paged_attention),
        repeats,
        num_layers * num_seqs * context * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize,
        4 * HEAD_DIM * scores,
    )


def measure_row_kernels(num_rows: int, dtype: torch.dtype, repeats: int) -> list[Timing]:
    """One call each; with few rows this is mostly what a call costs."""
    hidden, residual = (torch.randn(num_rows, HIDDEN).to(dtype) for _ in range(2))
    weight, gate_up = torch.ones(HIDDEN).to(dtype), torch.randn(num_rows, 2 * INTERMEDIATE).to(dtype)
    query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM).to(dtype)
    key = torch.randn(num_rows, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    positions, cos_sin_cache = torch.arange(num_rows), torch.randn(num_rows, HEAD_DIM)
    caches = [torch.zeros(num_rows, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    calls: list[tuple[str, int, Callable[[Any], object]]] = [
        ("add_rms_norm", 4 * hidden.nbytes, lambda m: m.add_rms_norm(hidden, residual, weight, 1e-5)),
        ("silu_and_mul", 3 * gate_up.nbytes // 2, lambda m: m.silu_and_mul(gate_up)),
        (
            "rotary_embedding",
            2 * (query.nbytes + key.nbytes),
            lambda m: m.rotary_embedding(positions, query, key, cos_sin_cache, False),
        ),
        ("store_kv", 4 * key.nbytes, lambda m: m.store_kv(key, key, *caches, positions * BLOCK_SIZE)),
    ]
    return [
        alternate(name, f"{num_rows} rows", partial(call, ops), partial(call, reference), 20 * repeats, size, 0)
        for name, size, call in calls
    ]


def main() -> None:
    options = parse_arguments()
    if not ops.is_available():
        raise SystemExit("there are no compiled kernels to measure: see the warning above")
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    dtype, machine = getattr(torch, options.dtype), this_machine()
    bandwidth = read_bandwidth(torch.device("cpu"))
    print_header(
        machine,
        "random weights in the shapes of SmolLM2-135M",
        threads=str(torch.get_num_threads()),
        dtype=options.dtype,
        bandwidth=f"{bandwidth / 1e9:.1f} GB/s read",
    )
    with torch.inference_mode():
        linear = LinearBenchmark(dtype, options.num_layers)
        timings = [linear.measure(num_rows, options.repeats) for num_rows in options.rows]
        for case in ATTENTION_CASES:
            timings.append(measure_attention(*case, dtype, options.num_layers, options.repeats))
        for num_rows in options.rows:
            timings.extend(measure_row_kernels(num_rows, dtype, options.repeats))
    headers = ["kernel", "case", "ms", "best", "GB/s", "GFLOP/s", "torch ms", "speed-up"]
    print(format_table(headers, [timing.row() for timing in timings]))
    result = {
        "benchmark": "kernels",
        "machine": machine,
        "dtype": options.dtype,
        "num_threads": torch.get_num_threads(),
        "read_bytes_per_s": bandwidth,
        "timings": [timing.result() for timing in timings],
    }
    print_json(result, options.json)


if __name__ == "__main__":
    main()
