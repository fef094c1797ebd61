"""What proposers are built from, in two steps: a drafter must be loaded before the KV pool can be sized."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from app.engine.model_runner import CausalLM
from app.engine.sampler import Sampler
from app.engine.sequence_state import SequenceState
from app.speculative.config import VerificationMode
from app.speculative.cost_model import CostModel
from app.speculative.led_drafter import DrafterFollower
from app.speculative.proposer import Proposer
from models.causal_lm import CausalLM as LoadedModel
from models.kv_spec import LayerKVSpec
from models.model_config import ModelConfig


@dataclass(frozen=True)
class TargetContext:
    """The target, as far as a drafter must fit it."""

    folder: Path
    model: LoadedModel | None  # None away from the target
    model_config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    progress: bool  # show bars while loading


@dataclass(frozen=True)
class ProposerContext:
    """The worker that a proposer serves."""

    state: SequenceState
    sampler: Sampler
    verification: VerificationMode
    kv_layers: list[tuple[torch.Tensor, ...]]  # the pools of `kv_specs`, in their order
    num_blocks: int
    max_num_batched_tokens: int
    device: torch.device


@dataclass(frozen=True)
class LoadedProposer:
    """A proposer whose drafter, if it has one, is loaded; `build` once the pool holds its KV layers."""

    kv_specs: list[LayerKVSpec]
    build: Callable[[ProposerContext], Proposer]
    soft_drafts: bool  # it may hand out a distribution a draft
    states_acceptance: bool = False  # its drafts say how likely each is to be kept
    drafter: CausalLM | None = None  # whose passes drafts cost; None: they are as good as free
    follow: Callable[[list[tuple[torch.Tensor, ...]]], DrafterFollower] | None = (
        None  # over the pools of `kv_specs`, on ranks that share the drafter; None: rank 0 has it alone
    )
    keeps_up: bool = False  # its KV follows the target's, with drafts or without: rows of steps without run later
    num_lookahead_tokens: int = 0  # tokens after a block that the drafter's KV in it depends on
    draft_cost: CostModel | None = None  # of a pass of a drafter that runs elsewhere
    elsewhere_token_bytes: int = 0  # of KV that it keeps there, for each token that the target does
