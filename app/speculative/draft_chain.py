"""Drawing drafts one after another from an autoregressive drafter."""

from collections.abc import Callable

import numpy as np
import torch

from app.engine.logits_processor import LogitsRows
from app.engine.plan import StepPlan
from app.speculative.loaded_proposer import ProposerContext
from app.speculative.proposer import Drafts
from app.speculative.verifier import is_coupled


def draw_chain(
    context: ProposerContext,
    plan: StepPlan,
    may_draft: np.ndarray,  # [num_seqs] bool, in the order of the plan's `scheduled`
    logits: Callable[[int, np.ndarray, np.ndarray], torch.Tensor],
) -> Drafts:
    """Draws each sequence's drafts, at most as many as the plan allows, from the distribution that verification uses.

    `logits(depth, drafting, token_ids)` runs the drafter for draft `depth` (from 0) of the sequences `drafting` [n],
    given the drafts `token_ids` [n, depth] before it, and returns fp32 [n, vocab_size]. Coupled rows are drawn with
    verification's own noise. A sequence whose logits are not usable drafts no further.
    """
    slots = np.array([scheduled.slot for scheduled in plan.scheduled], dtype=np.int64)
    limits = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)
    limits[~may_draft] = 0
    token_ids = np.zeros((len(slots), limits.max(initial=0)), dtype=np.int64)
    num_tokens = np.zeros(len(slots), dtype=np.int64)
    probs: torch.Tensor | None = None
    drafting = np.flatnonzero(limits > 0)
    coupled = is_coupled(context.verification, context.sampler, slots[drafting])
    for depth in range(token_ids.shape[1]):
        drawn_from = logits(depth, drafting, token_ids[drafting, :depth])
        rows = LogitsRows(slots[drafting], token_ids[drafting], num_tokens[drafting])
        drawn = context.sampler.draw_drafts(drawn_from, rows, coupled)
        token_ids[drafting, depth] = drawn.token_ids
        if drawn.probs is not None:
            if probs is None:
                probs = drawn.probs.new_empty((*token_ids.shape, drawn_from.shape[1]))
            soft = drawn.prob_rows >= 0
            where = torch.from_numpy(drafting[soft]).to(probs.device)
            probs[where, depth] = drawn.probs[torch.from_numpy(drawn.prob_rows[soft]).to(probs.device)]
        num_tokens[drafting[drawn.usable]] += 1
        goes_on = drawn.usable & (limits[drafting] > depth + 1)
        drafting, coupled = drafting[goes_on], coupled[goes_on]
        if not len(drafting):
            break
    return Drafts(token_ids, num_tokens, probs)
