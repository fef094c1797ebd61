"""From a configuration to a rank: target, drafter, KV pool, in the order in which their sizes become known."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from app.engine.kv_cache import KVCache, block_bytes
from app.engine.kv_sizing import StepShape, available_memory, plan_num_blocks
from app.engine.logits_processor import LogitsProcessor
from app.engine.model_runner import ModelRunner
from app.engine.sampler import Sampler
from app.engine.sequence_state import SequenceState
from app.engine_config import EngineConfig
from app.follower import Follower
from app.speculative.controller import DraftLengthController, calibrate
from app.speculative.cost_model import CostModel
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.proposer import Drafts, Verdict
from app.speculative.registry import check_target, load_proposer
from app.speculative.step_decision import StepDecision
from app.speculative.verifier import Verifier
from app.worker import Worker
from kernels import ops
from kernels.cpu import threads
from kernels.packed_weight import BlockScaledWeight, PackedWeight
from models import parallel
from models.causal_lm import CausalLM
from models.checkpoint import resolve_checkpoint
from models.config import read_model_config
from models.loader import load_model
from models.model_config import ModelConfig
from models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 8192
CALIBRATED_ROWS = 128  # larger passes cost in proportion
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """What the scheduler's side must know of the model."""

    folder: Path  # of the checkpoint, converted where it was no folder
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    num_blocks: int
    num_lookahead_tokens: int  # that the prefix cache's digests must cover, for the drafter's sake
    weight_bytes: int  # of the target, read once a step
    controller: DraftLengthController | None = None  # of drafts that are made elsewhere, told before they are


@dataclass(frozen=True)
class _Networks:
    """What a rank has loaded, and the KV pool of all its layers: the target's first, then the drafter's."""

    model: CausalLM
    loaded_proposer: LoadedProposer | None
    pool: KVCache
    max_model_len: int


def load_worker(
    config: EngineConfig, progress: bool, num_ranks_on_host: int = 1, remote: LoadedProposer | None = None
) -> tuple[Worker, LoadedModel]:
    """Loads what `config` names, with bars where `progress`, as the only rank or as rank 0 of this process's group.

    `remote` stands in for a drafter that has been loaded elsewhere.
    Raises ValueError for what cannot be honoured, before any weight is read where that can be told.
    """
    check_ranks(config)
    check_drafter(config, remote)
    folder = resolve_checkpoint(config.model, progress, DTYPES.get(config.dtype))
    model_config, tokenizer = read_model_config(folder), load_tokenizer(folder)
    networks = _load_networks(config, folder, tokenizer, progress, num_ranks_on_host, remote)
    proposer, pool = networks.loaded_proposer, networks.pool
    logger.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB; context %d tokens",
        pool.num_blocks,
        pool.block_size,
        pool.num_bytes / 2**20,
        networks.max_model_len,
    )
    worker, controller = build_worker(config, networks.model, proposer, pool, networks.max_model_len), None
    if remote is not None and not remote.states_acceptance:
        controller, worker.controller = worker.controller, None
    return worker, LoadedModel(
        folder=folder,
        tokenizer=tokenizer,
        eos_token_ids=model_config.eos_token_ids,
        vocab_size=model_config.vocab_size,
        max_model_len=networks.max_model_len,
        num_blocks=pool.num_blocks,
        num_lookahead_tokens=proposer.num_lookahead_tokens if proposer is not None else 0,
        weight_bytes=weight_bytes(networks.model),
        controller=controller,
    )


def load_follower(config: EngineConfig, num_ranks_on_host: int) -> Follower:
    """Loads another rank's shares of what `load_worker` loads, in step with it.

    Raises ValueError as `load_worker` does.
    """
    assert parallel.tp_rank() > 0
    assert parallel.tp_size() == config.tensor_parallel_size
    folder = resolve_checkpoint(config.model, False, DTYPES.get(config.dtype))
    networks = _load_networks(config, folder, load_tokenizer(folder), False, num_ranks_on_host)
    model, proposer, pool = networks.model, networks.loaded_proposer, networks.pool
    num_layers, speculative = len(model.kv_specs()), config.speculative_config
    drafter = None
    if proposer is not None:
        assert proposer.follow is not None, "rank 0 drafts alone"
        drafter = proposer.follow(pool.layers[num_layers:])
    state = SequenceState(config.max_num_seqs, networks.max_model_len, config.block_size)
    follower = Follower(state, ModelRunner(model, pool.layers[:num_layers]), drafter, pool.device)
    if speculative is not None and speculative.num_speculative_tokens == "auto":
        calibrate_target(config, follower.model_runner)
    follower.await_decision()  # rank 0 has calibrated, and built, all that is its own
    return follower


def _load_networks(
    config: EngineConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    progress: bool,
    num_ranks_on_host: int,
    remote: LoadedProposer | None = None,
) -> _Networks:
    device = select_device(config.device)
    if device.type == "cpu" or config.num_threads is not None:
        torch.set_num_threads(config.num_threads or threads.num_threads())
    model_config = read_model_config(folder)
    max_model_len = served_context(config, model_config)
    check_target(config.speculative_config, folder, model_config)
    model = load_model(folder, DTYPES.get(config.dtype), device, progress, max_model_len)
    speculative, loaded_proposer = config.speculative_config, remote
    has_share = speculative is not None and speculative.shares_drafter(parallel.tp_size())
    if speculative is not None and speculative.placement == "inline" and (parallel.tp_rank() == 0 or has_share):
        target = TargetContext(
            folder, model, model.config, tokenizer, max_model_len, model.config.dtype, device, progress
        )
        loaded_proposer = load_proposer(speculative, target)
    specs = model.kv_specs() + (loaded_proposer.kv_specs if loaded_proposer is not None else [])
    num_blocks = plan_num_blocks(
        None if config.kv_cache_memory == "auto" else config.kv_cache_memory,
        available_memory(device, num_ranks_on_host),
        block_bytes(specs, config.block_size)
        + config.block_size * (loaded_proposer.elsewhere_token_bytes if loaded_proposer is not None else 0),
        config.block_size,
        step_shape(config, model_config, max_model_len, loaded_proposer),
    )
    pool = KVCache(specs, parallel.least(num_blocks), config.block_size, device)
    if device.type == "cpu":  # up to here torch's operators did the work
        ops.set_num_threads(config.num_threads, model.config.dtype)
    return _Networks(model, loaded_proposer, pool, max_model_len)


def build_worker(
    config: EngineConfig, model: CausalLM, loaded_proposer: LoadedProposer | None, pool: KVCache, max_model_len: int
) -> Worker:
    """The worker of loaded networks and an allocated pool."""
    state = SequenceState(config.max_num_seqs, max_model_len, config.block_size)
    sampler = Sampler(LogitsProcessor(state))
    num_layers, speculative, device = len(model.kv_specs()), config.speculative_config, pool.device
    verification = speculative.verification_mode if speculative is not None else "auto"
    proposer, controller = None, None
    if loaded_proposer is not None:
        assert speculative is not None
        proposer = loaded_proposer.build(
            ProposerContext(
                state=state,
                sampler=sampler,
                verification=verification,
                kv_layers=pool.layers[num_layers:],
                num_blocks=pool.num_blocks,
                max_num_batched_tokens=config.max_num_batched_tokens,
                device=device,
            )
        )
        if speculative.num_speculative_tokens == "auto":
            controller = load_controller(config, model, loaded_proposer, pool)
    if parallel.tp_size() > 1:
        parallel.tell(StepDecision.of(Verdict.nothing(), Drafts.none(0)).packed())
    return Worker(
        state=state,
        model_runner=ModelRunner(model, pool.layers[:num_layers]),
        verifier=Verifier(sampler, verification),
        proposer=proposer,
        controller=controller,
        vocab_size=model.config.vocab_size,
        device=device,
    )


def load_controller(
    config: EngineConfig, model: CausalLM, proposer: LoadedProposer, pool: KVCache
) -> DraftLengthController:
    """Times passes of the target, and of the drafter if there is one, to start the controller's cost models."""
    assert config.speculative_config is not None
    num_layers, draft_cost = len(model.kv_specs()), proposer.draft_cost
    pass_cost = calibrate_target(config, ModelRunner(model, pool.layers[:num_layers]))
    if proposer.drafter is not None:
        draft_cost = calibrate_drafter(config, ModelRunner(proposer.drafter, pool.layers[num_layers:]))
    return DraftLengthController(
        config.max_num_seqs,
        config.speculative_config.draft_limit,
        pass_cost,
        draft_cost,
        proposer.states_acceptance,
        proposer.keeps_up,
    )


def calibrate_target(config: EngineConfig, model_runner: ModelRunner) -> CostModel:
    """What a pass of the target costs; every rank must run it."""
    return _calibrate(model_runner, max(_calibrated_rows(config), 2))


def calibrate_drafter(config: EngineConfig, model_runner: ModelRunner) -> CostModel:
    """What a pass of the drafter costs: a row a sequence."""
    return _calibrate(model_runner, min(_calibrated_rows(config), max(config.max_num_seqs, 2)))


def _calibrated_rows(config: EngineConfig) -> int:
    return min(config.max_num_batched_tokens, CALIBRATED_ROWS)


def _calibrate(model_runner: ModelRunner, most_rows: int) -> CostModel:
    rows = [2**power for power in range(most_rows.bit_length()) if 2**power <= most_rows]
    return calibrate(model_runner.time_pass, rows)


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all weights, packed, scaled or plain, each counted once."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    others = {
        id(value.data): value.nbytes
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, PackedWeight | BlockScaledWeight)
    }
    return plain + sum(others.values())


def check_ranks(config: EngineConfig) -> None:
    """Raises ValueError where the configuration asks for other ranks than this process is one of."""
    if config.tensor_parallel_size != parallel.tp_size():
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and an engine outside Ray Serve has one rank: "
            "use 1, or serve it with `serve run`"
        )


def check_drafter(config: EngineConfig, remote: LoadedProposer | None) -> None:
    """Raises ValueError where drafts are to be made elsewhere, and nobody makes them."""
    speculative = config.speculative_config
    if speculative is not None and speculative.placement == "actor" and remote is None:
        raise ValueError(
            "speculative_config.placement is actor, and an engine outside Ray Serve has no actors: use inline, or "
            "serve it with `serve run`"
        )


def select_device(name: str) -> torch.device:
    """Raises ValueError for cuda where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', and torch finds no CUDA device: use 'auto' or 'cpu'")
    return torch.device(name)


def served_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """The longest sequence that is served, in tokens.

    Raises ValueError above what the checkpoint's positions allow.
    """
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, and the checkpoint's max_position_embeddings {limit}: lower it"
        )
    return config.max_model_len


def step_shape(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int, proposer: LoadedProposer | None
) -> StepShape:
    speculative = config.speculative_config
    return StepShape(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=speculative.draft_limit if speculative is not None else 0,
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        soft_drafts=proposer is not None and proposer.soft_drafts,
    )
