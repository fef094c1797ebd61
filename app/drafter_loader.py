"""From a configuration to a drafter away from its target."""

from dataclasses import dataclass

import torch

from app.engine.kv_cache import KVCache, block_bytes
from app.engine.logits_processor import LogitsProcessor
from app.engine.model_runner import ModelRunner
from app.engine.sampler import Sampler
from app.engine.sequence_state import SequenceState
from app.engine_config import EngineConfig
from app.speculative.cost_model import CostModel
from app.speculative.detached_drafter import DetachedDrafter
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.registry import load_proposer
from app.speculative.sequence_mirror import MirrorImage, SequenceMirror
from app.worker_loader import DTYPES, calibrate_drafter, select_device, served_context
from kernels import ops
from models.checkpoint import resolve_checkpoint
from models.config import read_model_config
from models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class DrafterDescription:
    """What the target's side must know of a drafter before it sizes its KV pool."""

    token_bytes: int  # of the drafter's KV
    soft_drafts: bool
    states_acceptance: bool
    draft_cost: CostModel | None  # None: its drafts are as good as free, or their number is fixed


class DrafterLoader:
    """Holds what is loaded until the target has sized the pool whose block ids the drafter shares."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for a drafter that does not fit the target."""
        assert config.speculative_config is not None
        folder = resolve_checkpoint(config.model, False, DTYPES.get(config.dtype))
        model_config = read_model_config(folder)
        self._config = config
        self._max_model_len = served_context(config, model_config)
        has_network = config.speculative_config.has_network
        self._device = select_device(config.device) if has_network else torch.device("cpu")
        target = TargetContext(
            folder=folder,
            model=None,
            model_config=model_config,
            tokenizer=load_tokenizer(folder),
            max_model_len=self._max_model_len,
            dtype=DTYPES.get(config.dtype) or model_config.dtype,
            device=self._device,
            progress=False,
        )
        loaded = load_proposer(config.speculative_config, target)
        assert loaded is not None
        if has_network and self._device.type == "cpu":
            ops.set_num_threads(None, target.dtype)
        self._loaded: LoadedProposer = loaded

    def describe(self) -> DrafterDescription:
        """Times passes of the drafter, if it has a network, where draft lengths are chosen by what they cost."""
        config, loaded, draft_cost = self._config, self._loaded, None
        assert config.speculative_config is not None
        if loaded.drafter is not None and config.speculative_config.num_speculative_tokens == "auto":
            pool = KVCache(loaded.kv_specs, 1, config.block_size, self._device)
            draft_cost = calibrate_drafter(config, ModelRunner(loaded.drafter, pool.layers))
        return DrafterDescription(
            block_bytes(loaded.kv_specs, 1), loaded.soft_drafts, loaded.states_acceptance, draft_cost
        )

    def build(self, num_blocks: int, image: MirrorImage) -> DetachedDrafter:
        """A drafter over a pool of the target's blocks, which goes on from `image`."""
        config, loaded = self._config, self._loaded
        assert config.speculative_config is not None
        state = SequenceState(config.max_num_seqs, self._max_model_len, config.block_size)
        mirror = SequenceMirror(state)
        mirror.take(image)
        context = ProposerContext(
            state=state,
            sampler=Sampler(LogitsProcessor(state)),
            verification=config.speculative_config.verification_mode,
            kv_layers=KVCache(loaded.kv_specs, num_blocks, config.block_size, self._device).layers,
            num_blocks=num_blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=self._device,
        )
        return DetachedDrafter(mirror, loaded.build(context))
