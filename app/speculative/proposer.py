"""What every proposer answers to, and what it hands to verification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from app.engine.batch import BatchOutline
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState


@dataclass(frozen=True)
class Drafts:
    """Drafts of a step, in the order of the plan's `scheduled`."""

    token_ids: np.ndarray  # [num_seqs, k] int64; entries past num_tokens are not read
    num_tokens: np.ndarray  # [num_seqs] int64: 0 <= num_tokens <= the plan's num_draft_tokens
    probs: torch.Tensor | None = None  # [num_seqs, k, vocab_size] fp32 the drafts were drawn from; None: one-hot
    acceptance: np.ndarray | None = None  # [num_seqs, k] fp64: probability that each is kept, given all before it
    blind_block_ids: Sequence[int] = ()  # hit by the plan's admissions, and not to be drafted from

    @staticmethod
    def none(num_seqs: int) -> "Drafts":
        return Drafts(np.zeros((num_seqs, 0), dtype=np.int64), np.zeros(num_seqs, dtype=np.int64))


@dataclass(frozen=True)
class Verdict:
    """What the target said to a batch; arrays are in the order of its sequences."""

    emitted_token_ids: np.ndarray  # [num_seqs, 1 + k] int64; entries past num_emitted are not read
    num_emitted: np.ndarray  # [num_seqs] int64: accepted + 1, or 0 where the sequence does not sample or failed
    num_accepted: np.ndarray  # [num_seqs] int64
    failed: np.ndarray  # [num_seqs] bool: a logits row up to the first rejection was not usable (NaN, or all -inf)

    @staticmethod
    def nothing() -> "Verdict":
        """On no sequence: what stands before the first step."""
        none = np.zeros(0, dtype=np.int64)
        return Verdict(np.zeros((0, 1), dtype=np.int64), none, none, none.astype(bool))


class Proposer(Protocol):
    """Owns its drafter, the drafter's KV layers and what it remembers of each slot."""

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Computes what hangs on earlier steps' tensors and must not wait, while all their slots are still there.

        Called before `plan`, the next one, is applied: the last step's tokens have left for their clients, and no
        block that it wrote has changed hands.
        """

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        """Of slots [n], whose sequences have been in a plan before, those that it has what to draft from; bool [n].

        A draft that is planned for another would be counted upon, and never come.
        """

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        """Drafts for the plan's batch.

        `state` has the plan applied. May raise: the worker then goes on without drafts and calls `reset`.
        """

    def observe(self, batch: BatchOutline, hidden_states: torch.Tensor | None, verdict: Verdict) -> None:
        """Sees the target's step, after commit; other steps may have been drafted for since.

        Beside the target `batch` is a whole `Batch`, and `hidden_states` [num_tokens, hidden_size]; away from it there
        are none.
        """

    def reset(self) -> None:
        """Forgets all that is known of the slots, so that drafting starts clean after a fault."""
