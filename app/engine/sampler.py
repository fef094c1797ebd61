"""Draws tokens: arg-max for greedy rows, Gumbel arg-max for coupled ones, inverse CDF for the others."""

from dataclasses import dataclass

import numpy as np
import torch

from app.engine.logits_processor import LogitsProcessor, LogitsRows
from app.engine.randomness import Purpose, gumbels, gumbels_on_device, stream_keys, token_counters, uniforms

_NOISE_AT_ONCE = {"cpu": 2**16, "cuda": 2**20}
"""Entries of Gumbel noise made at once, of eight bytes and several copies: a cache's worth, or a buffer's."""


@dataclass(frozen=True)
class SampledRows:
    """What rows of logits say: a token where arg-max or the coupled noise settles it, else the distribution."""

    token_ids: torch.Tensor  # [num_rows] int64; not to be read in rows that have probs
    usable: torch.Tensor  # [num_rows] bool: the row has a largest logit, and it is finite
    probs: torch.Tensor | None  # [n, vocab_size] fp32, processed; of the rows neither greedy nor coupled
    prob_rows: np.ndarray  # [num_rows] int64: the row's row in `probs`, or -1


@dataclass(frozen=True)
class DrawnRows:
    """Drafts drawn from rows of a drafter's logits."""

    token_ids: np.ndarray  # [num_rows] int64
    usable: np.ndarray  # [num_rows] bool: where False there is no draft
    probs: torch.Tensor | None  # as in SampledRows: what each draft was drawn from
    prob_rows: np.ndarray  # [num_rows] int64


class Sampler:
    """Serves verification and drafters alike: one processed distribution, and in coupled rows one noise, for both."""

    def __init__(self, logits_processor: LogitsProcessor) -> None:
        self.state = logits_processor.state
        self.table = logits_processor.table
        self.logits_processor = logits_processor
        self._vocabulary = np.zeros(0, dtype=np.uint64)  # counters of all tokens, kept from row to row

    def sample(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] fp32; left as they are
        rows: LogitsRows,
        coupled: np.ndarray,  # [num_rows] bool; greedy rows are greedy either way
    ) -> SampledRows:
        """Settles what can be settled without knowing the drafts' fate. `table` must be fresh for the rows' slots."""
        greedy, changed = self.table.is_greedy[rows.slots], self.logits_processor.changes(rows)
        token_ids, usable = _argmax(logits)
        prob_rows = np.full(len(rows), -1, dtype=np.int64)
        if greedy.all() and not changed.any():
            return SampledRows(token_ids, usable, None, prob_rows)
        noisy, soft = coupled & ~greedy, ~(coupled | greedy)
        groups = [(logits, np.flatnonzero(~changed), np.flatnonzero(~changed))]
        if changed.any():
            where = np.flatnonzero(changed)
            index = _on(logits.device, where)
            processed = self.logits_processor.process(logits.index_select(0, index), rows[where])
            token_ids[index], is_finite = _argmax(processed)
            usable[index] &= is_finite
            groups.append((processed, where, np.arange(len(where))))

        probs, num_soft = [], 0
        for group_logits, where, source in groups:
            drawn = noisy[where]
            if drawn.any():
                keys = stream_keys(*self._counters(rows[where[drawn]]), Purpose.COUPLED)
                token_ids[_on(logits.device, where[drawn])] = self._coupled_argmax(group_logits, source[drawn], keys)
            drawn = soft[where]
            if drawn.any():
                probs.append(_take(group_logits, source[drawn]).softmax(dim=-1))
                prob_rows[where[drawn]] = num_soft + np.arange(len(probs[-1]))
                num_soft += len(probs[-1])
        together = None if not probs else probs[0] if len(probs) == 1 else torch.cat(probs)
        return SampledRows(token_ids, usable, together, prob_rows)

    def draw_drafts(self, logits: torch.Tensor, rows: LogitsRows, coupled: np.ndarray) -> DrawnRows:
        """Draws a draft for every row, as `sample` settles it or from the row's distribution."""
        sampled = self.sample(logits, rows, coupled)
        token_ids = sampled.token_ids
        if sampled.probs is not None:
            soft = np.flatnonzero(sampled.prob_rows >= 0)
            numbers = np.empty(len(soft))
            numbers[sampled.prob_rows[soft]] = uniforms(*self._counters(rows[soft]), Purpose.DRAFT)
            drawn = inverse_cdf(sampled.probs, _on(logits.device, numbers))
            token_ids[_on(logits.device, soft)] = drawn[_on(logits.device, sampled.prob_rows[soft])]
        if logits.device.type == "cpu":
            return DrawnRows(token_ids.numpy(), sampled.usable.numpy(), sampled.probs, sampled.prob_rows)
        host = torch.stack([token_ids, sampled.usable.long()]).cpu().numpy()  # one copy, not two
        return DrawnRows(host[0], host[1].astype(bool), sampled.probs, sampled.prob_rows)

    def _counters(self, rows: LogitsRows) -> tuple[np.ndarray, np.ndarray]:
        return self.state.seeds[rows.slots], self.logits_processor.positions(rows)

    def _coupled_argmax(self, logits: torch.Tensor, rows: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        """arg max(log probs + Gumbel noise) of the given rows; a softmax would only shift each row's logits."""
        rows_at_once = max(1, _NOISE_AT_ONCE[logits.device.type] // logits.shape[1])
        drawn = []
        for start in range(0, len(rows), rows_at_once):
            piece = slice(start, start + rows_at_once)
            if logits.device.type == "cpu":
                drawn.append(torch.from_numpy(self._noisy_argmax(logits.numpy(), rows[piece], keys[piece])))
            else:
                noise = gumbels_on_device(_on(logits.device, keys[piece].view(np.int64)), logits.shape[1])
                drawn.append((_take(logits, rows[piece]) + noise).argmax(dim=-1))
        return torch.cat(drawn)

    def _noisy_argmax(self, logits: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """A piece of `_coupled_argmax`; int64 [n]."""
        if len(self._vocabulary) != logits.shape[1]:
            self._vocabulary = token_counters(np.arange(logits.shape[1]))
        if len(rows) > 1:
            return (logits[rows] + gumbels(keys[:, None], self._vocabulary)).argmax(axis=-1)
        scores = logits[rows[0]]
        token_ids = np.flatnonzero(scores > -np.inf)
        if 0 < 2 * len(token_ids) < len(scores):  # truncation has left few tokens: only they need noise
            return token_ids[[(scores[token_ids] + gumbels(keys, self._vocabulary[token_ids])).argmax()]]
        return np.array([(scores + gumbels(keys, self._vocabulary)).argmax()])


def inverse_cdf(
    weights: torch.Tensor,  # [n, vocab_size], 0 or more, not all 0 in a row; need not add up to 1
    numbers: torch.Tensor,  # [n] float64 in (0, 1)
) -> torch.Tensor:
    """Draws one token a row in float64; int64 [n]. A token of weight 0 is never drawn."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The product may round up to the total itself, which no token's interval holds.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return drawn.clamp_(max=weights.shape[1] - 1)  # only a row that is not usable (NaN) goes past its end


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit's token, the lowest of equals, and whether that logit is finite; NaN counts as largest."""
    if logits.device.type == "cpu":  # numpy's is vectorised: ten times faster than torch's
        host = logits.numpy()
        indices = host.argmax(axis=-1)
        return torch.from_numpy(indices), torch.from_numpy(np.isfinite(host[np.arange(len(host)), indices]))
    largest, token_ids = logits.max(dim=-1)
    return token_ids, largest.isfinite()


def _take(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, _on(logits.device, rows))


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
