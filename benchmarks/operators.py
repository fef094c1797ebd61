"""The torch operators of a step, each timed alone: what the step may be measured against."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.draft_cost import plan_target, row_elements
from benchmarks.machine import call_times
from models.model_config import ModelConfig


@dataclass(frozen=True)
class StepShape:
    """A batch in which every sequence brings the same number of rows."""

    num_seqs: int
    rows_per_seq: int
    context_len: int  # keys that a sequence attends to
    logits_per_seq: int

    @property
    def num_rows(self) -> int:
        return self.num_seqs * self.rows_per_seq


def matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of one layer's matrices: qkv, o, gate and up, down."""
    query, key_value = config.num_attention_heads * config.head_dim, 2 * config.num_key_value_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return [(query + key_value, hidden), (hidden, query), (2 * intermediate, hidden), (hidden, intermediate)]


def is_dense(config: ModelConfig) -> bool:
    """Grouped-query attention and one MLP a layer: what `TorchOperators` knows."""
    return config.latent_attention is None and config.moe is None


def step_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the matrices that every step reads from end to end: all layers and the output head.

    Of experts those of one row; more rows touch more.
    """
    if not is_dense(config):
        return int(row_elements(plan_target(config)) * dtype.itemsize)
    layer = sum(rows * columns for rows, columns in matrix_shapes(config))
    return (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size) * dtype.itemsize


class TorchOperators:
    """Random tensors of a model's shapes; every layer has matrices of its own, so that none stays in a cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        shapes = matrix_shapes(config)
        self._layers = [[self._random(*shape) for shape in shapes] for _ in range(config.num_hidden_layers)]
        self._head = self._random(config.vocab_size, config.hidden_size)
        self._times: dict[StepShape, dict[str, float]] = {}

    def times_ms(self, shape: StepShape, num_repeats: int = 5) -> dict[str, float]:
        """Milliseconds of each kind of operator over a whole step, and `total`, their sum. Measured once a shape."""
        if shape not in self._times:
            with torch.inference_mode():
                calls = {"linear": self._linear(shape), **self._rest(shape)}
                times = {name: self._time_ms(call, num_repeats) for name, call in calls.items()}
                times["attention"] = min(self._time_ms(call, num_repeats) for call in self._attention(shape))
            self._times[shape] = {**times, "total": sum(times.values())}
        return self._times[shape]

    def _time_ms(self, call: Callable[[], None], num_repeats: int) -> float:
        return 1e3 * statistics.median(call_times(call, self.device, num_repeats))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _linear(self, shape: StepShape) -> Callable[[], None]:
        inputs = {width: self._random(shape.num_rows, width) for _, width in matrix_shapes(self.config)}
        last = self._random(shape.num_seqs * shape.logits_per_seq, self.config.hidden_size)

        def call() -> None:
            for matrices in self._layers:
                for matrix in matrices:
                    functional.linear(inputs[matrix.shape[1]], matrix)
            functional.linear(last, self._head).float()

        return call

    def _attention(self, shape: StepShape) -> list[Callable[[], None]]:
        """Three ways to the same, over contiguous keys and values, a layer's own; nothing is gathered from pages.

        Which is fastest depends on dtype and shape by an order of magnitude. Two of them lay the query heads that
        share a key head side by side, as rows.
        """
        config, rows = self.config, shape.rows_per_seq
        group = config.num_attention_heads // config.num_key_value_heads
        kv_shape = (shape.num_seqs, config.num_key_value_heads, shape.context_len, config.head_dim)
        layers = [(self._random(*kv_shape), self._random(*kv_shape)) for _ in self._layers]
        query = self._random(shape.num_seqs, config.num_attention_heads, rows, config.head_dim)
        grouped = query.view(shape.num_seqs, config.num_key_value_heads, group * rows, config.head_dim)
        visible = torch.ones(rows, shape.context_len, dtype=torch.bool, device=self.device)
        visible = visible.tril(shape.context_len - rows)
        mask = None if rows == 1 else visible
        grouped_mask = None if rows == 1 else visible.repeat(group, 1)
        causal = rows == shape.context_len

        def fused() -> None:
            for key, value in layers:
                functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=None if causal else mask, is_causal=causal, enable_gqa=True
                )

        def fused_groups() -> None:
            for key, value in layers:
                functional.scaled_dot_product_attention(grouped, key, value, attn_mask=grouped_mask)

        def products() -> None:
            for key, value in layers:
                scores = (grouped @ key.transpose(-1, -2)).float()
                if grouped_mask is not None:
                    scores.masked_fill_(~grouped_mask, -torch.inf)
                scores.softmax(dim=-1).to(self.dtype) @ value

        return [fused, fused_groups, products]

    def _rest(self, shape: StepShape) -> dict[str, Callable[[], None]]:
        """Norms, rotary embedding, activation, storing KV, the embedding and the choice of the next token."""
        config, num_layers = self.config, self.config.num_hidden_layers
        hidden, weight = self._random(shape.num_rows, config.hidden_size), self._random(config.hidden_size)
        gate_up = self._random(shape.num_rows, 2, config.intermediate_size)
        num_heads = config.num_attention_heads + config.num_key_value_heads
        heads = self._random(shape.num_rows, num_heads, config.head_dim)
        cosine = self._random(shape.num_rows, 1, config.head_dim)
        key_value = self._random(shape.num_rows, 2 * config.num_key_value_heads * config.head_dim)
        pool, slots = torch.zeros_like(key_value), torch.arange(shape.num_rows, device=self.device)
        token_ids = torch.randint(config.vocab_size, (shape.num_rows,), device=self.device)
        num_logits = shape.num_seqs * shape.logits_per_seq
        logits = torch.randn(num_logits, config.vocab_size, device=self.device)

        def norm() -> None:
            for _ in range(2 * num_layers):
                functional.rms_norm(hidden + hidden, weight.shape, weight, config.rms_norm_eps)

        def rotary() -> None:
            for _ in range(num_layers):
                first, second = heads.chunk(2, dim=-1)
                heads * cosine + torch.cat((-second, first), dim=-1) * cosine

        def activation() -> None:
            for _ in range(num_layers):
                functional.silu(gate_up[:, 0]) * gate_up[:, 1]

        def store() -> None:
            for _ in range(num_layers):
                pool.index_copy_(0, slots, key_value)

        def ends() -> None:
            functional.embedding(token_ids, self._head)
            logits.argmax(dim=-1)

        return {"norm": norm, "rotary": rotary, "activation": activation, "store": store, "ends": ends}


def decode_shape(num_seqs: float, rows_per_seq: float, context_len: float) -> StepShape:
    """The nearest whole batch to the averages of a run."""
    rows = max(1, round(rows_per_seq))
    return StepShape(max(1, round(num_seqs)), rows, max(rows, math.ceil(context_len)), rows)
