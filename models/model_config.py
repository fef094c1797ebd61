"""What the program knows of a network, once its config.json has been read and checked."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a factor (Chen et al., 2023: position interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Pairs that turn less than `low_freq_factor` times within the original context are slowed by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float  # pairs that turn more often than this are left alone
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """Slow pairs interpolated, fast ones kept, a ramp between (Peng et al., 2023: YaRN, section 3.2)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float  # pairs that turn more often than this within the original context are kept
    beta_slow: float  # pairs that turn less often are interpolated
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool = True  # the ramp's ends are rounded outwards to whole pairs

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.mscale is None or self.mscale_all_dim is None:
            return yarn_mscale(self.factor, 1.0)
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The sharpening of attention over a context `factor` times as long (Peng et al., 2023, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    scaling: LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | None = None
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + head_dim / 2)


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1)."""

    q_lora_rank: int | None  # None: queries are projected at once
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    bias: bool  # of the down projections

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """What a layer caches of a token: the normed latent and the rotated key of all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """Layers of routed and shared experts (DeepSeek-V3 report, section 2.1.2)."""

    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    topk_method: str  # a key of models.layers.router.TOPK_METHODS
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int  # so many first layers have a dense MLP


@dataclass(frozen=True)
class ModelConfig:
    """Hugging Face's names where they exist."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # RMS norm of every query and key head, before RoPE
    sliding_windows: tuple[int | None, ...]  # one a layer; w: a token sees itself and the w - 1 before it
    dtype: torch.dtype  # of weights, activations and KV
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    weight_block_size: tuple[int, int] = (128, 128)  # of FP8 weights, each block with a scale of its own
    latent_attention: LatentAttentionConfig | None = None  # None: grouped-query attention
    moe: MoEConfig | None = None  # None: every layer has a dense MLP
    num_nextn_predict_layers: int = 0  # modules of multi-token prediction behind the last layer
