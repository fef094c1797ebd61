"""How many drafts each sequence gets in a step: as many as raise the batch's tokens per second."""

from dataclasses import dataclass

import numpy as np

from app.speculative.cost_model import CostModel

MARGIN = 1.03  # predicted gain that drafting must show: less is within the error of the prediction
CAUTION = 1.04  # times its predicted cost that a draft must earn


@dataclass(frozen=True)
class Decision:
    """Draft lengths, with what is predicted for them and for plain decoding."""

    num_tokens: np.ndarray  # [num_seqs] int64
    predicted_rate: float  # tokens per second of the sequences that sample, prompt chunks not counted
    plain_rate: float  # the same without drafts, and without a drafter

    @property
    def drafts(self) -> bool:
        return bool(self.num_tokens.any())


def choose_draft_lengths(
    acceptance: np.ndarray,  # [num_seqs, k] fp64: conditional acceptance probabilities by position
    limits: np.ndarray,  # [num_seqs] int64: drafts available or allowed, at most k
    num_other_rows: int,  # rows of the step that sample nothing: prompt chunks
    pass_cost: CostModel,  # of the target
    draft_cost: CostModel | None,  # of one pass of the drafter over one row a sequence; None: drafts are free
    num_followed: int = 0,  # sequences whose rows the drafter runs later, with others, where a step has no drafts
    start_s: float = 0.0,  # that drafting costs beside its passes
    trust: float = 1.0,  # in a rate predicted for drafts
) -> Decision:
    """Maximises expected tokens / predicted seconds over all splits of drafts among the sequences.

    The probability that draft j is kept, given all before it, falls with j, so taking drafts in the order
    of their probability takes a prefix of each sequence's; the best number of them is read off one curve. A
    drafter's passes are bought depth by depth: each depth has a curve of its own. One that keeps up with the target
    is not spared the rows of a step without drafts: they are so many more of a pass to come. Prompt chunks count in
    what an added row costs, not in what a token is worth.
    """
    num_seqs, depth = acceptance.shape
    kept = np.cumprod(acceptance, axis=1)
    available = np.arange(depth) < limits[:, None]
    decode_seconds = float(pass_cost.seconds(num_seqs))
    plain_rate = num_seqs / decode_seconds
    rate_without = plain_rate
    if draft_cost is not None and num_followed:
        later_s = _of(draft_cost, num_seqs + num_followed) - _of(draft_cost, num_seqs)
        rate_without = num_seqs / (decode_seconds + later_s)
    best = Decision(np.zeros(num_seqs, dtype=np.int64), rate_without, plain_rate)
    if not available.any():
        return best
    depths = [depth] if draft_cost is None else range(1, int(limits.max()) + 1)
    step_rows = num_seqs + num_other_rows
    draft_seconds = start_s
    rate_before = 0.0
    for num_passes in depths:
        taken = available[:, :num_passes]
        if draft_cost is not None:
            draft_seconds += _of(draft_cost, int(taken[:, num_passes - 1].sum()))
        gains = kept[:, :num_passes][taken]
        order = np.argsort(-gains, kind="stable")
        added_rows = np.arange(1, len(order) + 1)
        added_seconds = pass_cost.seconds(step_rows + added_rows) - pass_cost.seconds(step_rows) + draft_seconds
        rates = (num_seqs + np.cumsum(gains[order])) / (decode_seconds + CAUTION * added_seconds)
        most = int(np.argmax(rates))
        if rates[most] <= rate_before:  # deeper drafts are kept more seldom, and cost as much
            break
        rate_before = float(rates[most])
        if rates[most] > max(MARGIN / trust * rate_without, best.predicted_rate):
            owners = np.nonzero(taken)[0][order[: most + 1]]
            best = Decision(np.bincount(owners, minlength=num_seqs), float(rates[most]), plain_rate)
    return best


def _of(cost: CostModel, rows: int) -> float:
    return float(cost.seconds(rows))
