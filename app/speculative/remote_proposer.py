"""Drafts that are made elsewhere, as the rank that verifies them sees them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from app.engine.batch import BatchOutline
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.proposer import Drafts, Verdict


class RemoteProposer:
    """Takes what comes with a plan; a plan that nothing comes with has no drafts."""

    def __init__(self, receive: Callable[[Any], Drafts], states_acceptance: bool, device: torch.device) -> None:
        self._receive = receive  # raises where a plan's drafts failed, or do not come in time
        self._states_acceptance = states_acceptance
        self._device = device

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Who drafts sees the same results."""

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        if plan.drafts is None or not plan.num_draft_tokens:
            none = Drafts.none(len(plan.scheduled))
            return replace(none, acceptance=np.zeros(none.token_ids.shape)) if self._states_acceptance else none
        drafts = self._receive(plan.drafts)
        return drafts if drafts.probs is None else replace(drafts, probs=drafts.probs.to(self._device))

    def observe(self, batch: BatchOutline, hidden_states: torch.Tensor | None, verdict: Verdict) -> None:
        """Who drafts sees the same results."""

    def reset(self) -> None:
        """Who sends the plans sees to it."""
