"""Drafts of multi-token prediction modules, and an engine that drafts by script, to hold one against the other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from app.llm_engine import LLMEngine
from app.speculative import mtp
from tests.helpers.direct_deepseek import DirectDeepseek, Tensor


class MTPReference(DirectDeepseek):
    """Every draft computed anew from the first token on: no KV, no batch (arXiv 2412.19437, section 2.2).

    Module j is given module j - 1 and token p + 1 + j at every position p. Past the last module all begins again, as
    if what the modules gave out at the last position were the target's hidden states of the positions after it.
    """

    def __init__(self, folder: Path, hidden_is_normed: bool = True, recycled_is_normed: bool = True) -> None:
        super().__init__(folder)
        self.hidden_is_normed, self.recycled_is_normed = hidden_is_normed, recycled_is_normed
        self.num_modules = self.config["num_nextn_predict_layers"]
        self._target_states: list[tuple[list[int], Tensor]] = []  # of whole texts

    @torch.inference_mode()
    def next_draft_logits(self, known: list[int], drafts: list[int]) -> Tensor:
        """Of the draft after `drafts`, where the target has computed all of `known` but its last: [vocab_size]."""
        text, depth = known + drafts, len(drafts)
        given = self.target_states(known[:-1])
        while True:
            states, ahead = given, []
            for module in range(self.num_modules):
                outputs = self.module_outputs(module, text[1 + module : 1 + module + len(states)], states)
                if depth == 0:
                    return self.draft_logits(module, outputs)[-1]
                depth -= 1
                states = self.recycled(module, outputs) if self.recycled_is_normed else outputs
                ahead.append(states[-1:])
            given = torch.cat((given, *ahead))

    def target_states(self, token_ids: list[int]) -> Tensor:
        """What the modules are given: [num_tokens, hidden_size]. Those of a text that goes on are the same."""
        for text, states in self._target_states:
            if text[: len(token_ids)] == token_ids:
                return states[: len(token_ids)]
        self._target_states.append((token_ids, self.hidden_states(token_ids, self.hidden_is_normed)))
        return self._target_states[-1][1]

    def experts(self, prefix: str, x: Tensor) -> Tensor:
        """All experts on all tokens; those that were not chosen count nothing. What the direct form says, faster."""
        config = self.config
        scores = torch.sigmoid(x @ self.tensors[f"{prefix}gate.weight"].T)  # [num_tokens, num_experts]
        choice = (scores + self.tensors[f"{prefix}gate.e_score_correction_bias"]).unflatten(-1, (config["n_group"], -1))
        groups = choice.topk(2, dim=-1).values.sum(-1)
        barred = torch.ones_like(groups, dtype=torch.bool)
        barred.scatter_(1, groups.topk(config["topk_group"]).indices, False)
        choice = choice.masked_fill(barred[:, :, None], -torch.inf).flatten(1)
        chosen = torch.zeros_like(scores).scatter_(1, choice.topk(config["num_experts_per_tok"]).indices, 1.0)
        weights = scores * chosen
        if config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([self.mlp(f"{prefix}experts.{i}.", x) for i in range(config["n_routed_experts"])], dim=1)
        routed = (weights[:, :, None] * outputs).sum(1) * config["routed_scaling_factor"]
        return routed + self.mlp(f"{prefix}shared_experts.", x)


@dataclass(frozen=True)
class DraftStep:
    """One draft of one sequence, as the engine computed it."""

    known: list[int]
    drafts: list[int]  # before this one
    logits: Tensor  # [vocab_size]


class DraftRecorder:
    """Notes the logits of every draft, and may have another token drawn in its place.

    `script(known, drafts)` names that token, or None to leave the choice to the logits. So drafts are accepted that
    modules with random weights would never propose.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, script: Callable[[list[int], list[int]], int | None] | None = None
    ) -> None:
        self.steps: list[DraftStep] = []
        self._script = script
        self._draw_chain = mtp.draw_chain
        monkeypatch.setattr(mtp, "draw_chain", self._recorded_chain)

    def _recorded_chain(self, context, plan, may_draft, logits):
        slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)

        def recorded(depth: int, drafting: np.ndarray, token_ids: np.ndarray) -> Tensor:
            rows = logits(depth, drafting, token_ids)
            drawn_from = rows.clone()
            for row, slot in enumerate(slots[drafting].tolist()):
                known = context.state.token_ids[slot, : context.state.num_tokens[slot]].tolist()
                drafts = token_ids[row].tolist()
                self.steps.append(DraftStep(known, drafts, rows[row]))
                token = None if self._script is None else self._script(known, drafts)
                if token is not None:
                    drawn_from[row] = -100.0
                    drawn_from[row, token] = 100.0
            return drawn_from

        return self._draw_chain(context, plan, may_draft, recorded)

    def differences(self, reference: MTPReference) -> dict[tuple[int, int], float]:
        """By (known tokens, drafts) the largest difference from the reference; of equal steps the worst."""
        by_text: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tensor]] = {}
        for step in self.steps:
            by_text.setdefault((tuple(step.known), tuple(step.drafts)), []).append(step.logits)
        worst: dict[tuple[int, int], float] = {}
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # matrices this small only wait for each other
        for (known, drafts), logits in sorted(by_text.items(), key=lambda step: -len(step[0][0])):
            expected = reference.next_draft_logits(list(known), list(drafts))
            difference = (torch.stack(logits) - expected).abs().max().nan_to_num(nan=torch.inf).item()
            place = len(known), len(drafts)
            worst[place] = max(worst.get(place, 0.0), difference)
        torch.set_num_threads(num_threads)
        return worst


def poison(engine: LLMEngine) -> None:
    """NaN in all of the drafter's KV that nobody may read: blocks that are free and no known prefix."""
    manager = engine.block_manager
    blocks = [block for block in manager._free if manager._digests[block] is None]
    for layer in engine.executor.worker.proposer._context.kv_layers:
        for pool in layer:
            pool[blocks] = torch.nan
