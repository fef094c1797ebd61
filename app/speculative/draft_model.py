"""Drafts of a smaller causal language model with the target's vocabulary."""

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from app.engine.batch import Batch, build_batch
from app.engine.logits_processor import LogitsRows
from app.engine.model_runner import CausalLM
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.config import DraftModelConfig
from app.speculative.drafter_kv import DrafterKV
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.proposer import Drafts, Verdict
from app.speculative.verifier import is_coupled
from models.causal_lm import CausalLM as LoadedModel
from models.checkpoint import resolve_checkpoint
from models.layers.rotary import RotaryEmbedding
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

    @torch.inference_mode()
    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        self._kv.apply(plan)
        num_seqs = len(plan.scheduled)
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
        limits = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)
        hidden_states = self._catch_up(slots, limits > 0)

        token_ids = np.zeros((num_seqs, limits.max(initial=0)), dtype=np.int64)
        num_tokens = np.zeros(num_seqs, dtype=np.int64)
        probs: torch.Tensor | None = None
        drafting = np.flatnonzero(limits > 0)
        self._context.sampler.table.refresh(slots[drafting])
        coupled = is_coupled(self._context.verification, self._context.sampler, slots[drafting])
        for depth in range(token_ids.shape[1]):
            rows = LogitsRows(slots[drafting], token_ids[drafting], num_tokens[drafting])
            drawn = self._context.sampler.draw_drafts(self._logits(hidden_states), rows, coupled)
            token_ids[drafting, depth] = drawn.token_ids
            if drawn.probs is not None:
                if probs is None:
                    probs = drawn.probs.new_empty((*token_ids.shape, self._target_vocab_size))
                soft = drawn.prob_rows >= 0
                where = torch.from_numpy(drafting[soft]).to(probs.device)
                probs[where, depth] = drawn.probs[torch.from_numpy(drawn.prob_rows[soft]).to(probs.device)]
            num_tokens[drafting[drawn.usable]] += 1
            goes_on = drawn.usable & (limits[drafting] > depth + 1)
            drafting, coupled = drafting[goes_on], coupled[goes_on]
            if not len(drafting):
                break
            hidden_states = self._append(slots[drafting], token_ids[drafting, depth : depth + 1], depth)
        return Drafts(token_ids, num_tokens, probs)

    def observe(self, batch: Batch, hidden_states: torch.Tensor, verdict: Verdict) -> None:
        """The KV of accepted drafts is that of known tokens now; the last draft was never the drafter's input."""
        self._kv.extend(batch.slots, np.minimum(verdict.num_accepted, np.maximum(batch.num_draft_tokens - 1, 0)))

    def reset(self) -> None:
        self._kv.reset()

    def _catch_up(self, slots: np.ndarray, drafting: np.ndarray) -> torch.Tensor | None:
        """Computes what the drafter lacks; hidden states of the drafting sequences' last tokens, in their order.

        Drafting sequences are computed whole. The others follow the target, one step behind it, so that drafting can
        start at any time; where no sequence drafts, they wait until a block's worth of tokens makes a pass worthwhile.
        Sequences that never draft cost nothing.
        """
        state, context = self._context.state, self._context
        self._kv.truncate(slots[drafting], state.num_tokens[slots[drafting]] - 1)  # there must be a last row to run
        ends = np.where(drafting, state.num_tokens[slots], state.num_computed_tokens[slots])
        num_missing = np.maximum(ends - self._kv.num_computed_tokens[slots], 0)
        num_missing[~self._may_draft(slots)] = 0
        if not drafting.any():
            num_missing[num_missing < state.block_size] = 0

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

    def _logits(self, hidden_states: torch.Tensor | None) -> torch.Tensor:
        """fp32 [n, target's vocab_size]: the drafter's padding is cut off, the target's can not be drafted."""
        assert hidden_states is not None
        logits = self._model.compute_logits(hidden_states)[:, : self._target_vocab_size]
        num_absent = self._target_vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, num_absent), value=-torch.inf) if num_absent else logits

    def _may_draft(self, slots: np.ndarray) -> np.ndarray:
        params = [self._context.state.sampling_params[slot] for slot in slots]
        return np.array([each is not None and each.num_speculative_tokens != 0 for each in params], dtype=bool)


def load(config: DraftModelConfig, target: TargetContext) -> LoadedProposer:
    """Loads the draft model in the target's dtype.

    Raises ValueError where its vocabulary is another, before any weight is read.
    """
    folder = resolve_checkpoint(config.model, target.progress, target.dtype)
    check_same_vocabulary(target.tokenizer, load_tokenizer(folder))
    model = load_model(folder, target.dtype, target.device, target.progress)
    extend_positions(model, target.max_model_len)
    vocab_sizes = (model.config.vocab_size, target.model_config.vocab_size)
    return LoadedProposer(
        model.kv_specs(),
        lambda context: DraftModelProposer(model, *vocab_sizes, context),
        soft_drafts=True,
        drafter=model,
    )


def extend_positions(model: LoadedModel, max_model_len: int) -> None:
    """Makes the rotary tables cover the served context, which a draft checkpoint often states too short."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding) and len(module.cos_sin_cache) < max_model_len:
            longer = RotaryEmbedding(
                model.config.head_dim, max_model_len, model.config.rope, module.cos_sin_cache.device
            )
            module.cos_sin_cache = longer.cos_sin_cache


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
