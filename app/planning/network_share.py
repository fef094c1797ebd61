"""One rank's share of a network, counted on the very modules that would be loaded, without their weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from app.planning.checkpoint_shape import CheckpointShape
from app.planning.expert_load import ExpertLoad
from models import parallel
from models.block_fp8 import begins_with_blocks
from models.causal_lm import CausalLM
from models.drafters.deepseek_mtp import MTPModule
from models.kv_spec import LayerKVSpec
from models.layers.parameter import UnloadedParameter
from models.layers.rotary import RotaryEmbedding
from models.model_config import ModelConfig
from models.registry import ARCHITECTURES

META = torch.device("meta")
ROUTED = "routed experts"
PARTS = {  # a part by a module's name within a parameter's; the first that is found
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "eh_proj": "projection",
    "experts": ROUTED,
    "shared_experts": "shared experts",
    "gate": "norms and router",
    "self_attn": "attention",
    "mlp": "dense MLP",
}
OTHER_PART = "norms and router"
FP8_PARTS = ("attention", "dense MLP", "shared experts", ROUTED)  # their packed matrices; never the rest
SCALE_BYTES = 4  # one a block


@dataclass(frozen=True)
class WeightPart:
    num_bytes: int
    num_elements: int
    expanded_bytes: int  # if nothing were kept in FP8

    def __add__(self, other: "WeightPart") -> "WeightPart":
        return WeightPart(
            self.num_bytes + other.num_bytes,
            self.num_elements + other.num_elements,
            self.expanded_bytes + other.expanded_bytes,
        )


NOTHING = WeightPart(0, 0, 0)


@dataclass(frozen=True)
class Layout:
    """How a network lies on its ranks."""

    num_ranks: int = 1
    expert_parallel: bool = False
    keeps_fp8: bool = False  # FP8 weights of the checkpoint are FP8 in memory


@dataclass(frozen=True)
class NetworkShare:
    """What one rank holds of a network and reads in a pass."""

    parts: dict[str, WeightPart]  # by name, of this rank
    head: WeightPart  # what logits read: of this rank, its own or the target's
    num_parameters: int  # of the whole network
    kv_specs: list[LayerKVSpec]  # of this rank
    windows: tuple[int | None, ...]  # one a layer: how much of the context it reads; None: all
    attention_flops: int  # a row, token of its context, and layer
    experts: ExpertLoad | None
    keeps_fp8: bool

    @property
    def weight_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def expanded_bytes(self) -> int:
        """Of the weights, if none were kept in FP8."""
        return sum(part.expanded_bytes for part in self.parts.values())

    @property
    def token_bytes(self) -> int:
        """KV of a token."""
        return sum(spec.token_bytes for spec in self.kv_specs)

    @property
    def body(self) -> WeightPart:
        """What every pass reads whole."""
        rest = [part for name, part in self.parts.items() if name not in ("embedding", "lm_head", ROUTED)]
        return sum(rest, NOTHING)

    @property
    def routed(self) -> WeightPart:
        return self.parts.get(ROUTED, NOTHING)


def target_share(shape: CheckpointShape, layout: Layout) -> NetworkShare:
    """Raises ValueError where the ranks cannot share the network evenly."""
    config = shape.config
    _check_experts(config, layout)
    with _rank_of(layout):
        model = CausalLM(config, ARCHITECTURES[config.architecture].decoder_layer, 1, META)
        parts, num_parameters = _count(model, shape, layout)
        head = parts["embedding" if config.tie_word_embeddings else "lm_head"]
        return _network_share(shape, layout, parts, num_parameters, head, model.kv_specs())


def mtp_share(shape: CheckpointShape, layout: Layout, target: NetworkShare) -> NetworkShare:
    """One module of multi-token prediction, which reads the target's embedding and head."""
    config = shape.config
    with _rank_of(layout):
        rotary = RotaryEmbedding(config.head_dim, 1, config.rope, META)
        module = MTPModule(config, config.num_hidden_layers, rotary, own_embedding=False, own_head=False)
        parts, num_parameters = _count(module, shape, layout)
        return _network_share(shape, layout, parts, num_parameters, target.head, [module.layer.kv_spec])


def _network_share(
    shape: CheckpointShape,
    layout: Layout,
    parts: dict[str, WeightPart],
    num_parameters: int,
    head: WeightPart,
    kv_specs: list[LayerKVSpec],
) -> NetworkShare:
    config, expert_ranks = shape.config, layout.num_ranks if layout.expert_parallel else 1
    moe, mla = config.moe, config.latent_attention
    experts = None if moe is None else ExpertLoad(moe.n_routed_experts, moe.num_experts_per_tok, expert_ranks)
    num_heads = parallel.share(config.num_attention_heads, "num_attention_heads")
    # Scores and sums; in the absorbed form of latent attention both are of the latent.
    width = 2 * config.head_dim if mla is None else mla.cached_dim + mla.kv_lora_rank
    return NetworkShare(
        parts=parts,
        head=head,
        num_parameters=num_parameters,
        kv_specs=kv_specs,
        windows=config.sliding_windows[: len(kv_specs)],
        attention_flops=2 * num_heads * width,
        experts=experts,
        keeps_fp8=shape.has_fp8_weights and layout.keeps_fp8,
    )


def _count(network: nn.Module, shape: CheckpointShape, layout: Layout) -> tuple[dict[str, WeightPart], int]:
    """Each part's weights on this rank, and the parameters of the whole network."""
    parts: dict[str, WeightPart] = {}
    num_parameters = 0
    for name, parameter in network.named_parameters():
        assert isinstance(parameter, UnloadedParameter)
        part = next((part for module, part in PARTS.items() if module in name.split(".")), OTHER_PART)
        keeps_fp8 = shape.has_fp8_weights and layout.keeps_fp8 and parameter.packed and part in FP8_PARTS
        num_bytes, block_size = parameter.nbytes, shape.config.weight_block_size
        if keeps_fp8 and all(begins_with_blocks(shard, block_size) for shard in parameter.shards):
            num_blocks = math.prod(-(-n // b) for n, b in zip(parameter.shape[-2:], block_size, strict=True))
            num_bytes = parameter.numel() + SCALE_BYTES * num_blocks * math.prod(parameter.shape[:-2])
        parts[part] = parts.get(part, NOTHING) + WeightPart(num_bytes, parameter.numel(), parameter.nbytes)
        num_ranks = layout.num_ranks if layout.expert_parallel and part == ROUTED else 1  # that have others
        num_parameters += num_ranks * sum(math.prod(shard.stored_shape) for shard in parameter.shards)
    return parts, num_parameters


def _check_experts(config: ModelConfig, layout: Layout) -> None:
    if not layout.expert_parallel:
        return
    if config.moe is None:
        raise ValueError(f"expert_parallel is True, and {config.architecture} has no experts: remove it")
    if config.moe.n_routed_experts % layout.num_ranks:
        raise ValueError(
            f"n_routed_experts is {config.moe.n_routed_experts}, which tensor_parallel_size {layout.num_ranks} does "
            "not divide: use a divisor, or no expert_parallel"
        )


@contextmanager
def _rank_of(layout: Layout) -> Iterator[None]:
    """Within it networks are built as the last of the ranks builds them.

    All hold as much, but where a share does not begin with a block of FP8 scales and is expanded: then the last does.
    """
    assert parallel.tp_size() == 1
    last = parallel.TensorParallelGroup(layout.num_ranks - 1, layout.num_ranks, expert_parallel=layout.expert_parallel)
    with parallel.tensor_parallel_group(last):
        yield
