"""Drafts of a smaller causal language model with the target's vocabulary."""

from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from app.engine.batch import Batch, BatchOutline, build_batch
from app.engine.model_runner import CausalLM
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.config import DraftModelConfig
from app.speculative.draft_chain import draw_chain
from app.speculative.drafter_kv import DrafterKV
from app.speculative.led_drafter import DrafterFollower, LedDraftModel, LoneDraftModel
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.proposer import Drafts, Verdict
from models import parallel
from models.checkpoint import resolve_checkpoint
from models.loader import load_model
from models.tokenizer import load_tokenizer


class DraftModelProposer:
    """Runs the drafter over what it has not seen yet, then once for every further draft.

    Its KV are further layers on the target's block table; `DrafterKV` knows how far they are valid. Drafts are drawn
    from the processed distribution that verification uses, coupled rows with verification's own noise.
    """

    def __init__(
        self,
        model: CausalLM,
        draft_vocab_size: int,
        target_vocab_size: int,
        context: ProposerContext,
    ) -> None:
        self._model = model
        self._draft_vocab_size = draft_vocab_size
        self._target_vocab_size = target_vocab_size
        self._context = context
        self._kv = DrafterKV(context.state, context.num_blocks)

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Token ids are all that the drafter needs: `propose` catches up where it is to draft."""

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    @torch.inference_mode()
    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        self._kv.apply(plan)
        if not plan.num_draft_tokens:
            return Drafts.none(len(plan.scheduled))
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
        limits = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)
        hidden_states = self._compute_missing(slots, limits > 0)

        drafts = limits > 0
        last_rows = np.cumsum(drafts) - 1  # of each drafting sequence among the caught-up ones

        def logits(depth: int, drafting: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
            if depth:
                return self._logits(self._append(slots[drafting], token_ids[:, -1:], depth - 1))
            assert hidden_states is not None
            return self._logits(hidden_states[torch.from_numpy(last_rows[drafting]).to(hidden_states.device)])

        return draw_chain(self._context, plan, drafts, logits)

    def observe(self, batch: BatchOutline, hidden_states: torch.Tensor | None, verdict: Verdict) -> None:
        """The KV of accepted drafts is that of known tokens now; the last draft was never the drafter's input."""
        self._kv.extend(batch.slots, np.minimum(verdict.num_accepted, np.maximum(batch.num_draft_tokens - 1, 0)))

    def reset(self) -> None:
        self._kv.reset()

    def _compute_missing(self, slots: np.ndarray, drafting: np.ndarray) -> torch.Tensor | None:
        """Computes what the drafter lacks; hidden states of the drafting sequences' last tokens, in their order.

        Drafting sequences are computed whole. The others wait until they draft: rows of many steps cost less together,
        and those of a sequence that never drafts are not run at all.
        """
        state, context = self._context.state, self._context
        self._kv.truncate(slots[drafting], state.num_tokens[slots[drafting]] - 1)  # there must be a last row to run
        num_missing = np.where(drafting, state.num_tokens[slots] - self._kv.num_computed_tokens[slots], 0)

        last_hidden_states = []
        while num_missing.any():
            before = np.cumsum(num_missing) - num_missing
            num_rows = np.clip(context.max_num_batched_tokens - before, 0, num_missing)
            chosen = np.flatnonzero(num_rows)
            batch = build_batch(
                state,
                slots[chosen],
                self._kv.num_computed_tokens[slots[chosen]],
                num_rows[chosen],
                draft_token_ids=np.zeros((len(chosen), 0), dtype=np.int64),
                num_draft_tokens=np.zeros(len(chosen), dtype=np.int64),
                samples=(drafting & (num_rows == num_missing))[chosen],
                device=context.device,
            )
            hidden_states = self._forward(batch)
            last_hidden_states.append(hidden_states[torch.from_numpy(batch.logits_rows).to(context.device)])
            self._kv.extend(slots[chosen], num_rows[chosen])
            num_missing -= num_rows
        return torch.cat(last_hidden_states) if last_hidden_states else None

    def _append(self, slots: np.ndarray, token_ids: np.ndarray, depth: int) -> torch.Tensor:
        """Hidden states [n, hidden_size] after one more draft, `token_ids` [n, 1], behind `depth` others."""
        state, ones = self._context.state, np.ones(len(slots), dtype=np.int64)
        batch = build_batch(
            state,
            slots,
            state.num_tokens[slots] + depth,
            num_new_tokens=np.zeros_like(ones),  # the draft is the row: known tokens have been computed
            draft_token_ids=token_ids,
            num_draft_tokens=ones,
            samples=np.zeros(len(slots), dtype=bool),
            device=self._context.device,
        )
        return self._forward(batch)

    def _forward(self, batch: Batch) -> torch.Tensor:
        if self._draft_vocab_size < self._target_vocab_size:
            # Ids between the two are the target's padding: no text holds them, and the drafter's table ends before.
            batch.token_ids.clamp_(max=self._draft_vocab_size - 1)
        return self._model(batch.token_ids, batch.positions, self._context.kv_layers, batch.attention)

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """fp32 [n, target's vocab_size]: the drafter's padding is cut off, the target's can not be drafted."""
        logits = self._model.compute_logits(hidden_states)[:, : self._target_vocab_size]
        num_absent = self._target_vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, num_absent), value=-torch.inf) if num_absent else logits


def load(config: DraftModelConfig, target: TargetContext) -> LoadedProposer:
    """Loads the draft model in the target's dtype.

    Raises ValueError where its vocabulary is another, before any weight is read.
    """
    folder = resolve_checkpoint(config.model, target.progress, target.dtype)
    check_same_vocabulary(target.tokenizer, load_tokenizer(folder))
    has_ranks = parallel.tp_size() > 1
    is_whole = has_ranks and config.draft_tensor_parallel_size == 1
    with parallel.tensor_parallel_group(parallel.ALONE) if is_whole else nullcontext():
        # Rotary tables for the served context: a draft checkpoint often states a shorter one.
        model = load_model(folder, target.dtype, target.device, target.progress, target.max_model_len)
    network: CausalLM = model
    if has_ranks:
        network = LoneDraftModel(model) if is_whole else LedDraftModel(model)
    vocab_sizes = (model.config.vocab_size, target.model_config.vocab_size)

    def follow(kv_layers: list[tuple[torch.Tensor, ...]]) -> DrafterFollower:
        return DrafterFollower(
            lambda each: model(each.token_ids, each.positions, kv_layers, each.attention),
            lambda _, hidden_states: model.compute_logits(hidden_states),
            model.config.hidden_size,
            target.dtype,
            target.device,
        )

    return LoadedProposer(
        model.kv_specs(),
        lambda context: DraftModelProposer(network, *vocab_sizes, context),
        soft_drafts=True,
        drafter=network,
        follow=None if is_whole else follow,
    )


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raises ValueError naming the first id that stands for another token, or for none, in one of the two.

    Sizes say nothing: embeddings may be padded.
    """
    target_tokens, draft_tokens = (
        {token_id: token for token, token_id in tokenizer.get_vocab().items()} for tokenizer in (target, draft)
    )
    for token_id in sorted(target_tokens.keys() | draft_tokens.keys()):
        ours, theirs = target_tokens.get(token_id), draft_tokens.get(token_id)
        if ours != theirs:
            raise ValueError(
                f"speculative_config.model: token {token_id} is {_named(theirs)} to the draft model and {_named(ours)} "
                "to the target: use a draft model with the target's vocabulary"
            )


def _named(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
