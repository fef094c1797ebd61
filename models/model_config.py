"""What the program knows of a network, once its config.json has been read and checked."""

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
class RopeConfig:
    theta: float
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None


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
