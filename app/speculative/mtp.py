"""Drafts of the target's own multi-token prediction modules (DeepSeek-V3 report, arXiv 2412.19437, section 2.2).

Module j's row at position p holds the module before it (the target itself for j = 0) at p and token p + 1 + j, and
predicts token p + 2 + j. So a row of module j is settled once j + 1 tokens beyond it are known.

Draft s comes from module s % n of n. At position p, the last that the target has computed, its rows hold drafts where
tokens are not known: those at p - s + 1 to p, while s < n. Later drafts use the modules again, n positions further
each time, as if the outputs at p were the target's own at the n positions after it: output j, which predicts what
follows token p + 1 + j, is given to module 0 at p + 1 + j. With one module that is draft s at position p + s, given
the output before it; with several no position is left out, whose KV would be of no one knows what.
"""

import logging
from dataclasses import replace

import numpy as np
import torch

from app.engine.batch import Batch, BatchOutline, Rows, attention_metadata, lay_out_rows, select_rows, to_device
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.config import MTPConfig
from app.speculative.draft_chain import draw_chain
from app.speculative.draft_rows import DraftRows
from app.speculative.drafter_kv import DrafterKV
from app.speculative.held_rows import HeldRows, SlotRows
from app.speculative.led_drafter import DrafterFollower, DrafterPass, LedMTP
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.proposer import Drafts, Verdict
from kernels.metadata import AttentionMetadata
from models import parallel
from models.drafters.deepseek_mtp import DeepseekMTP, load_mtp

logger = logging.getLogger(__name__)


class MTPProposer:
    """Runs the modules over every row that the target has computed, then on from each sequence's last row.

    Rows wait until someone drafts, a sequence has a block of them, or a block that they complete may be shared: so
    the drafter's KV is as whole as the target's wherever a prefix is found, and steps without drafts cost a pass now
    and then. Rows that hold drafts are written behind the settled ones and over again.

    A sequence whose cached prefix lacks the drafter's KV, after a fault or of one that the controller has given up, is
    left alone: the KV can not be computed without the target's hidden states. The prefix's blocks are named, so that
    the prefix cache forgets them, and the next sequence to begin with it has the target compute them again.
    """

    def __init__(self, modules: DeepseekMTP, context: ProposerContext) -> None:
        self._modules = modules
        self._context = context
        self._kv = DrafterKV(context.state, context.num_blocks)
        max_num_seqs = len(context.state.num_tokens)
        self._is_blind = np.ones(max_num_seqs, dtype=bool)  # no drafter KV to draft from
        self._held = HeldRows(max_num_seqs)
        self._has_last = np.zeros((modules.num_modules, max_num_seqs), dtype=bool)
        # Outputs of each module's last settled row, by slot.
        self._last = torch.zeros(
            (modules.num_modules, max_num_seqs, modules.hidden_size), dtype=modules.dtype, device=context.device
        )

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Runs what completes blocks that the plan may share: of leaving sequences, or with those that join by a hit.

        A block's worth of rows is run in any case.
        """
        num_new = self._held.num_new
        if num_new.max() >= state.block_size:
            self._compute_held(state)
        elif plan.released_slots or any(admitted.num_computed_tokens for admitted in plan.admitted):
            slots = np.flatnonzero(num_new)
            settled = np.minimum(state.num_computed_tokens[slots], state.num_tokens[slots] - self._modules.num_modules)
            if (settled // state.block_size > self._kv.num_computed_tokens[slots] // state.block_size).any():
                self._compute_held(state)

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return ~self._is_blind[slots]

    @torch.inference_mode()
    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        blind_block_ids = self._forget(plan)
        num_rows = sum(scheduled.num_new_tokens + scheduled.num_draft_tokens for scheduled in plan.scheduled)
        drafts = any(scheduled.num_draft_tokens for scheduled in plan.scheduled)
        if drafts or self._held.num_new.sum() + num_rows > self._context.max_num_batched_tokens:
            self._compute_held(state)
        if not drafts:
            return replace(Drafts.none(len(plan.scheduled)), blind_block_ids=blind_block_ids)
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
        rows = DraftRows(self._modules.num_modules)

        def logits(depth: int, drafting: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
            own = slots[drafting]
            if depth:
                rows.narrow(drafting)
                self._deepen(depth, own, token_ids, rows)
            else:
                rows.start(drafting, select_rows(self._last[0], own))
            return self._modules.logits(depth % self._modules.num_modules, rows.outputs[-1])

        may_draft = self._has_last[0, slots] & ~self._is_blind[slots]
        return replace(draw_chain(self._context, plan, may_draft, logits), blind_block_ids=blind_block_ids)

    def observe(self, batch: BatchOutline, hidden_states: torch.Tensor | None, verdict: Verdict) -> None:
        """Keeps the target's rows of known tokens that count as computed."""
        assert isinstance(batch, Batch)
        assert hidden_states is not None, "modules stand beside the target"
        num_rows = batch.num_new_tokens + np.maximum(verdict.num_emitted - 1, 0) - verdict.failed
        num_rows[self._is_blind[batch.slots]] = 0
        if num_rows.sum() < batch.num_tokens:
            rows = np.repeat(batch.cu_seqlens_q[:-1] - np.cumsum(num_rows) + num_rows, num_rows)
            rows += np.arange(len(rows))
            hidden_states = select_rows(hidden_states, rows)
        if len(hidden_states):
            kept = num_rows > 0
            self._held.add(SlotRows(hidden_states, batch.slots[kept], num_rows[kept]))

    def reset(self) -> None:
        self._kv.reset()
        self._is_blind[:] = True
        self._drop(list(range(len(self._is_blind))))

    def _forget(self, plan: StepPlan) -> list[int]:
        """Drops what is known of slots that changed hands; an admitted one drafts if its cached prefix is whole.

        Names the blocks of prefixes that are not, where someone would draft from them.
        """
        self._kv.apply(plan)
        if plan.released_slots or plan.admitted or plan.given_up_slots:
            admitted_slots = (admitted.slot for admitted in plan.admitted)
            self._drop([*plan.released_slots, *admitted_slots, *plan.given_up_slots])
        self._is_blind[plan.released_slots] = True
        blind_block_ids: list[int] = []
        for admitted in plan.admitted:
            has_prefix = self._kv.num_computed_tokens[admitted.slot] == admitted.num_computed_tokens
            self._is_blind[admitted.slot] = not has_prefix
            if not has_prefix and admitted.slot not in plan.given_up_slots:
                num_hit = admitted.num_computed_tokens // self._context.state.block_size
                blind_block_ids += self._kv.lacking(admitted.block_ids[:num_hit])
        self._is_blind[plan.given_up_slots] = True
        return blind_block_ids

    def _drop(self, slots: list[int]) -> None:
        self._held.drop(slots)
        self._has_last[:, slots] = False

    @torch.inference_mode()
    def _compute_held(self, state: SequenceState) -> None:
        """Runs the modules over the target's rows that wait, each as far as its tokens are known."""
        if not self._held.num_new.any():
            return
        num_modules, device = self._modules.num_modules, self._context.device
        held = self._held.take(num_kept=num_modules - 1)
        hidden_states, slots, num_rows = held.hidden_states, held.slots, held.num_rows
        ends = state.num_computed_tokens[slots]
        starts = ends - num_rows
        for module in range(num_modules):
            settled = np.minimum(ends, state.num_tokens[slots] - 1 - module) - starts
            if (settled < num_rows).any():
                is_settled = np.arange(len(hidden_states)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
                index = np.flatnonzero(is_settled < np.repeat(settled, num_rows))
                hidden_states = select_rows(hidden_states, index)
                kept = settled > 0
                slots, starts, num_rows = slots[kept], starts[kept], settled[kept]
                if not len(slots):
                    return
            ends = starts + num_rows
            rows = lay_out_rows(slots, starts, num_rows)
            token_ids = self._known_tokens(rows.slots, rows.positions, module)
            outputs = self._run(module, slots, rows, token_ids, hidden_states)
            last = outputs if rows.max_seqlen_q == 1 else select_rows(outputs, rows.cu_seqlens_q[1:] - 1)
            self._last[module].index_copy_(0, to_device(slots, device), last)
            self._has_last[module, slots] = True
            hidden_states = outputs
        # The rows of the last module are the fewest: what it has settled all have.
        self._kv.extend(slots, np.maximum(ends - self._kv.num_computed_tokens[slots], 0))

    def _deepen(self, depth: int, slots: np.ndarray, token_ids: np.ndarray, rows: DraftRows) -> None:
        """Runs draft `depth`'s module over the rows that hold drafts, and adds their outputs to `rows`."""
        num_modules = self._modules.num_modules
        module = depth % num_modules
        ends = self._context.state.num_tokens[slots] - 1 + depth // num_modules * num_modules
        num_rows = np.minimum(depth, ends) if depth < num_modules else np.full(len(slots), num_modules)
        if module == 0:
            # All modules' outputs at the last position, as hidden states of the positions after it.
            given = torch.stack(rows.outputs, dim=1).flatten(0, 1)
        else:
            if depth < num_modules:  # before those with drafts stands the settled row
                rows.newest[:, -depth] = self._last[depth - 1, to_device(slots, self._context.device)]
            given = rows.newest_of(num_rows)
        drafts = token_ids[np.arange(depth) >= depth - num_rows[:, None]]
        layout = lay_out_rows(slots, ends - num_rows, num_rows)
        rows.add(self._run(module, slots, layout, drafts, given), num_rows)

    def _run(
        self,
        module: int,
        slots: np.ndarray,  # [num_seqs] int64
        rows: Rows,
        token_ids: np.ndarray,  # [num_tokens] int64
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    ) -> torch.Tensor:
        """The module's outputs; [num_tokens, hidden_size]."""
        context, device = self._context, self._context.device
        return self._modules(
            module,
            to_device(token_ids, device),
            hidden_states,
            to_device(rows.positions, device),
            context.kv_layers[module],
            attention_metadata(context.state, slots, rows, device),
        )

    def _known_tokens(self, slots: np.ndarray, positions: np.ndarray, module: int) -> np.ndarray:
        """The token that each row of a module holds: 1 + module positions beyond it."""
        return self._context.state.token_ids[slots, positions + 1 + module]


class _FirstModule:
    """What a draft costs, for the controller: one pass of the first module."""

    def __init__(self, modules: DeepseekMTP) -> None:
        self._modules = modules

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_layers: list[tuple[torch.Tensor, ...]],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        shape = (len(token_ids), self._modules.hidden_size)
        hidden_states = torch.zeros(shape, dtype=self._modules.dtype, device=token_ids.device)
        return self._modules(0, token_ids, hidden_states, positions, kv_layers[0], attention)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._modules.logits(0, hidden_states)


def load(config: MTPConfig, target: TargetContext) -> LoadedProposer:
    """Loads the checkpoint's MTP modules.

    Raises ValueError for a checkpoint that has none, or not all of one.
    """
    assert target.model is not None, "modules stand beside the target"
    modules = load_mtp(
        target.folder,
        target.model,
        target.dtype,
        target.device,
        target.progress,
        config.hidden_is_normed,
        config.recycled_is_normed,
    )
    if config.draft_limit > modules.num_modules and parallel.tp_rank() == 0:
        logger.warning(
            "%d drafts of %d MTP module(s): later ones re-use the modules, at lower acceptance",
            config.draft_limit,
            modules.num_modules,
        )
    network = LedMTP(modules) if parallel.tp_size() > 1 else modules

    def follow(kv_layers: list[tuple[torch.Tensor, ...]]) -> DrafterFollower:
        def run(each: DrafterPass) -> torch.Tensor:
            assert each.hidden_states is not None
            kv_layer = kv_layers[each.module_index]
            return modules(
                each.module_index, each.token_ids, each.hidden_states, each.positions, kv_layer, each.attention
            )

        return DrafterFollower(run, modules.logits, modules.hidden_size, modules.dtype, target.device)

    return LoadedProposer(
        modules.kv_specs(),
        lambda context: MTPProposer(network, context),
        soft_drafts=True,
        drafter=_FirstModule(network),
        follow=follow,
        keeps_up=True,
        num_lookahead_tokens=modules.num_modules,
    )
