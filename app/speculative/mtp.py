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

from app.engine.batch import Batch, build_batch
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.config import MTPConfig
from app.speculative.draft_chain import draw_chain
from app.speculative.drafter_kv import DrafterKV
from app.speculative.led_drafter import DrafterFollower, DrafterPass, LedMTP
from app.speculative.loaded_proposer import LoadedProposer, ProposerContext, TargetContext
from app.speculative.proposer import Drafts, Verdict
from kernels.metadata import AttentionMetadata
from models import parallel
from models.drafters.deepseek_mtp import DeepseekMTP, load_mtp

logger = logging.getLogger(__name__)


class MTPProposer:
    """Runs the modules over every row that the target has computed, then on from each sequence's last row.

    Settled rows are run in `catch_up`, whether anyone drafts or not, so that the drafter's KV is as whole as the
    target's, in shared blocks as well. Rows that hold drafts are written behind them and over again. A sequence
    whose cached prefix lacks the drafter's KV (after a fault) is left alone: it can not be computed without the
    target's hidden states.
    """

    def __init__(self, modules: DeepseekMTP, context: ProposerContext) -> None:
        self._modules = modules
        self._context = context
        self._kv = DrafterKV(context.state, context.num_blocks)
        max_num_seqs = len(context.state.num_tokens)
        self._is_blind = np.ones(max_num_seqs, dtype=bool)  # no drafter KV to draft from
        self._pending: dict[int, torch.Tensor] = {}  # by slot: hidden states of rows not caught up with [n, hidden]
        self._tails: dict[int, torch.Tensor] = {}  # by slot: those of the rows before, which later modules lack
        self._last: list[dict[int, torch.Tensor]] = [
            {} for _ in range(modules.num_modules)
        ]  # outputs of last settled rows

    @torch.inference_mode()
    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        slots = np.array([slot for slot in self._pending if not self._is_blind[slot]], dtype=np.int64)
        windows = [self._window(slot) for slot in slots.tolist()]
        self._pending = {}
        if not len(slots):
            return
        num_rows = np.array([len(window) for window in windows], dtype=np.int64)
        ends = state.num_computed_tokens[slots]
        starts = ends - num_rows
        hidden_states = torch.cat(windows)
        for module in range(self._modules.num_modules):
            settled = np.minimum(ends, state.num_tokens[slots] - 1 - module) - starts
            kept = np.flatnonzero(settled > 0)
            if not len(kept):
                return
            rows = np.concatenate([[0], np.cumsum(num_rows)])[:-1]
            index = np.concatenate([np.arange(rows[i], rows[i] + settled[i]) for i in kept])
            given = hidden_states[torch.from_numpy(index).to(hidden_states.device)]
            slots, starts, ends, num_rows = slots[kept], starts[kept], starts[kept] + settled[kept], settled[kept]
            outputs = self._run(
                module, slots, starts, num_rows, self._known_tokens(slots, starts, num_rows, module), given
            )
            last = outputs[torch.from_numpy(np.cumsum(num_rows) - 1).to(outputs.device)]
            self._last[module].update(zip(slots.tolist(), last.split(1), strict=True))
            hidden_states = self._modules.recycled(module, outputs)
        # The rows of the last module are the fewest: what it has settled all have.
        computed = self._kv.num_computed_tokens[slots]
        self._kv.extend(slots, np.maximum(ends - computed, 0))

    @torch.inference_mode()
    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        self._forget(plan)
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
        has_row = np.array([slot in self._last[0] for slot in slots.tolist()], dtype=bool)
        outputs = {slot: [last] for slot, last in self._last[0].items()}  # by slot, by depth: [num_rows, hidden_size]

        def logits(depth: int, drafting: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
            own = slots[drafting].tolist()
            if depth:
                self._deepen(depth, own, token_ids, outputs)
            last = torch.cat([outputs[slot][depth][-1:] for slot in own])
            return self._modules.logits(depth % self._modules.num_modules, last)

        return draw_chain(self._context, plan, has_row & ~self._is_blind[slots], logits)

    def observe(self, batch: Batch, hidden_states: torch.Tensor, verdict: Verdict) -> None:
        """Keeps the target's rows of known tokens until `catch_up`."""
        num_rows = batch.num_new_tokens + np.maximum(verdict.num_emitted - 1, 0)
        for i, slot in enumerate(batch.slots.tolist()):
            if not self._is_blind[slot] and not verdict.failed[i]:
                first = int(batch.cu_seqlens_q[i])
                self._pending[slot] = hidden_states[first : first + int(num_rows[i])]

    def reset(self) -> None:
        self._kv.reset()
        self._is_blind[:] = True
        self._drop(list(range(len(self._is_blind))))

    def _forget(self, plan: StepPlan) -> None:
        """Drops what is known of slots that changed hands; an admitted one drafts if its cached prefix is whole."""
        self._kv.apply(plan)
        self._drop(plan.released_slots)
        self._is_blind[plan.released_slots] = True
        for admitted in plan.admitted:
            self._drop([admitted.slot])
            has_prefix = self._kv.num_computed_tokens[admitted.slot] == admitted.num_computed_tokens
            self._is_blind[admitted.slot] = not has_prefix

    def _drop(self, slots: list[int]) -> None:
        for slot in slots:
            self._pending.pop(slot, None)
            self._tails.pop(slot, None)
            for last in self._last:
                last.pop(slot, None)

    def _window(self, slot: int) -> torch.Tensor:
        """Hidden states of the new rows, and of the rows before them that later modules have not settled."""
        window = self._pending[slot]
        if slot in self._tails:
            window = torch.cat([self._tails[slot], window])
        tail = self._modules.num_modules - 1
        if tail:
            self._tails[slot] = window[-tail:].clone()
        return window

    def _deepen(
        self, depth: int, slots: list[int], token_ids: np.ndarray, outputs: dict[int, list[torch.Tensor]]
    ) -> None:
        """Runs draft `depth`'s module over the rows that hold drafts, and appends their outputs to `outputs`."""
        num_modules = self._modules.num_modules
        module = depth % num_modules
        ends = self._context.state.num_tokens[slots] - 1 + depth // num_modules * num_modules
        num_rows = np.minimum(depth, ends) if depth < num_modules else np.full(len(slots), num_modules)
        if module == 0:
            given = self._outputs_ahead(slots, outputs)
        else:
            parts = []
            for slot, num in zip(slots, num_rows.tolist(), strict=True):
                before = [outputs[slot][-1]]
                if depth < num_modules and slot in self._last[depth - 1]:
                    before.insert(0, self._last[depth - 1][slot])  # the settled row before those with drafts
                parts.append(torch.cat(before)[-num:])
            given = self._modules.recycled(module - 1, torch.cat(parts))
        drafts = np.concatenate([token_ids[i, depth - num : depth] for i, num in enumerate(num_rows)])
        rows = self._run(module, np.array(slots, dtype=np.int64), ends - num_rows, num_rows, drafts, given)
        for slot, part in zip(slots, rows.split(num_rows.tolist()), strict=True):
            outputs[slot].append(part)

    def _outputs_ahead(self, slots: list[int], outputs: dict[int, list[torch.Tensor]]) -> torch.Tensor:
        """All modules' outputs at the last position, as hidden states of the positions after it, slot by slot."""
        num_modules = self._modules.num_modules
        ahead = [
            self._modules.recycled(j, torch.cat([outputs[slot][j - num_modules][-1:] for slot in slots]))
            for j in range(num_modules)
        ]
        return torch.stack(ahead, dim=1).flatten(0, 1)  # [num_slots * num_modules, hidden_size]

    def _run(
        self,
        module: int,
        slots: np.ndarray,  # [n] int64
        starts: np.ndarray,  # [n] int64: position of each sequence's first row
        num_rows: np.ndarray,  # [n] int64
        token_ids: np.ndarray,  # [sum(num_rows)] int64
        hidden_states: torch.Tensor,  # [sum(num_rows), hidden_size]
    ) -> torch.Tensor:
        """The module's outputs, before its norm; [sum(num_rows), hidden_size]."""
        context, nothing = self._context, np.zeros(len(slots), dtype=np.int64)
        batch = build_batch(
            context.state,
            slots,
            starts,
            num_rows,
            nothing[:, None][:, :0],
            nothing,
            nothing.astype(bool),
            context.device,
        )
        batch = replace(batch, token_ids=torch.from_numpy(token_ids).to(context.device))
        kv_layer = context.kv_layers[module]
        return self._modules(module, batch.token_ids, hidden_states, batch.positions, kv_layer, batch.attention)

    def _known_tokens(self, slots: np.ndarray, starts: np.ndarray, num_rows: np.ndarray, module: int) -> np.ndarray:
        """The token that each row of a module holds: 1 + module positions beyond it."""
        token_ids = self._context.state.token_ids
        return np.concatenate(
            [
                token_ids[slot, start + 1 + module : start + 1 + module + num]
                for slot, start, num in zip(slots, starts, num_rows, strict=True)
            ]
        )


class _FirstModule:
    """What a draft costs, for the controller: one pass of the first module."""

    def __init__(self, modules: DeepseekMTP, hidden_size: int, dtype: torch.dtype) -> None:
        self._modules = modules
        self._hidden_size, self._dtype = hidden_size, dtype

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_layers: list[tuple[torch.Tensor, ...]],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        hidden_states = torch.zeros((len(token_ids), self._hidden_size), dtype=self._dtype, device=token_ids.device)
        return self._modules(0, token_ids, hidden_states, positions, kv_layers[0], attention)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._modules.logits(0, hidden_states)


def load(config: MTPConfig, target: TargetContext) -> LoadedProposer:
    """Loads the checkpoint's MTP modules.

    Raises ValueError for a checkpoint that has none, or not all of one.
    """
    modules = load_mtp(target.folder, target.model, target.dtype, target.device, target.progress)
    if config.draft_limit > modules.num_modules:
        logger.warning(
            "%d drafts of %d MTP module(s): later ones re-use the modules, at lower acceptance",
            config.draft_limit,
            modules.num_modules,
        )
    network = LedMTP(modules) if parallel.tp_size() > 1 else modules
    hidden_size = target.model_config.hidden_size

    def follow(kv_layers: list[tuple[torch.Tensor, ...]]) -> DrafterFollower:
        def run(each: DrafterPass) -> torch.Tensor:
            assert each.hidden_states is not None
            kv_layer = kv_layers[each.module_index]
            return modules(
                each.module_index, each.token_ids, each.hidden_states, each.positions, kv_layer, each.attention
            )

        return DrafterFollower(run, modules.logits, hidden_size, target.dtype, target.device)

    return LoadedProposer(
        modules.kv_specs(),
        lambda context: MTPProposer(network, context),
        soft_drafts=True,
        drafter=_FirstModule(network, hidden_size, target.dtype),
        follow=follow,
        first_pass_is_due=True,
        num_lookahead_tokens=modules.num_modules,
    )
