"""Turns logits into those of the distribution that a request asked for, each row under its own history."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.sampling_table import SamplingTable
from app.engine.sequence_state import SequenceState
from app.engine.truncation import on_rows, truncate


@dataclass(frozen=True)
class LogitsRows:
    """Which token each row of logits is for: the one after a slot's known tokens and so many drafts."""

    slots: np.ndarray  # [num_rows] int64
    draft_token_ids: np.ndarray  # [num_rows, k] int64
    num_drafts: np.ndarray  # [num_rows] int64: the row's history ends with so many of its drafts

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, rows: np.ndarray) -> "LogitsRows":
        return LogitsRows(self.slots[rows], self.draft_token_ids[rows], self.num_drafts[rows])


class LogitsProcessor:
    """Order: logit_bias, penalties, bad words, min_tokens, temperature, min_p, top-k, top-p.

    Histories come from `state` and the row's drafts on demand: there is no count that could run ahead of a rejection.
    The repetition penalty looks at prompt and output, everything else at the output alone. Greedy rows keep their
    scale: nothing divides them by a temperature, and nothing truncates them.
    """

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self.table = SamplingTable(state)

    def positions(self, rows: LogitsRows) -> np.ndarray:
        """Index in the sequence of the token that each row is for; int64 [num_rows]."""
        return self.state.num_tokens[rows.slots] + rows.num_drafts

    def changes(self, rows: LogitsRows) -> np.ndarray:
        """Rows that `process` would change; the others' logits are their distribution's already. Bool [num_rows]."""
        table, slots = self.table, rows.slots
        return table.edits_every_row[slots] | table.shapes[slots] | self._holds_back_stops(rows)

    def process(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Processes `logits` [num_rows, vocab_size] fp32 in place and returns them."""
        table, slots = self.table, rows.slots
        self._add_bias(logits, np.flatnonzero(table.has_bias[slots]), rows)
        self._penalise_repetition(logits, np.flatnonzero(table.repetition_penalty[slots] != 1), rows)
        counted = (table.presence_penalty[slots] != 0) | (table.frequency_penalty[slots] != 0)
        self._penalise_counts(logits, np.flatnonzero(counted), rows)
        self._mask_bad_words(logits, np.flatnonzero(table.has_bad_words[slots]), rows)
        self._mask_stops(logits, np.flatnonzero(self._holds_back_stops(rows)), rows)

        shaped = np.flatnonzero(table.shapes[slots])
        on_rows(logits, shaped, lambda part: self._shape(part, slots[shaped]))
        return logits

    def _holds_back_stops(self, rows: LogitsRows) -> np.ndarray:
        num_output_tokens = self.positions(rows) - self.state.num_prompt_tokens[rows.slots]
        return num_output_tokens < self.table.min_tokens[rows.slots]

    def _add_bias(self, logits: torch.Tensor, chosen: np.ndarray, rows: LogitsRows) -> None:
        if not len(chosen):
            return
        token_ids, biases = zip(*(self.table.bias[slot] for slot in rows.slots[chosen]), strict=True)
        index = _flat_index(logits, chosen, token_ids)
        logits.view(-1)[index] += _on(logits, np.concatenate(biases))

    def _penalise_repetition(self, logits: torch.Tensor, chosen: np.ndarray, rows: LogitsRows) -> None:
        """Divides positive logits of seen tokens by the penalty, multiplies negative ones (CTRL, arXiv 1909.05858)."""
        if not len(chosen):
            return
        index = np.unique(self._history(rows, chosen, np.zeros(len(chosen), dtype=np.int64), logits.shape[1]))
        where = _on(logits, index)
        seen = logits.view(-1)[where]
        penalty = _on(logits, self.table.repetition_penalty[rows.slots[index // logits.shape[1]]])
        logits.view(-1)[where] = torch.where(seen > 0, seen / penalty, seen * penalty)

    def _penalise_counts(self, logits: torch.Tensor, chosen: np.ndarray, rows: LogitsRows) -> None:
        """Subtracts frequency_penalty times the count, and presence_penalty once, from tokens of the output."""
        if not len(chosen):
            return
        starts = self.state.num_prompt_tokens[rows.slots[chosen]]
        index, counts = np.unique(self._history(rows, chosen, starts, logits.shape[1]), return_counts=True)
        slots = rows.slots[index // logits.shape[1]]
        penalty = self.table.frequency_penalty[slots] * counts + self.table.presence_penalty[slots]
        logits.view(-1)[_on(logits, index)] -= _on(logits, penalty.astype(np.float32))

    def _mask_bad_words(self, logits: torch.Tensor, chosen: np.ndarray, rows: LogitsRows) -> None:
        """Bans the last token of each bad word whose other tokens end the row's output."""
        banned = []
        for row in chosen:
            words = self.table.bad_words[rows.slots[row]]
            output = self._output_tail(rows, row, max(len(word) for word in words) - 1)
            ends = [
                word[-1]
                for word in words
                if len(word) <= len(output) + 1 and np.array_equal(output[len(output) + 1 - len(word) :], word[:-1])
            ]
            banned.append(np.array(ends, dtype=np.int64))
        _mask(logits, chosen, banned)

    def _mask_stops(self, logits: torch.Tensor, chosen: np.ndarray, rows: LogitsRows) -> None:
        _mask(logits, chosen, [self.table.stop_token_ids[slot] for slot in rows.slots[chosen]])

    def _shape(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        """Temperature, min_p, top-k and top-p, in place; a row's largest logit becomes 0, so that none overflows."""
        table = self.table
        logits.sub_(logits.amax(dim=-1, keepdim=True))
        logits.div_(_on(logits, table.temperature[slots])[:, None])
        min_p, top_k, top_p = table.min_p[slots], table.top_k[slots], table.top_p[slots]
        if min_p.any():
            floor = _on(logits, min_p).log_()[:, None]  # -inf where off: nothing lies below
            logits.masked_fill_(logits < floor, -torch.inf)
        truncated = np.flatnonzero((top_k > 0) | (top_p < 1))
        on_rows(logits, truncated, lambda part: truncate(part, top_k[truncated], top_p[truncated]))

    def _history(
        self,
        rows: LogitsRows,
        chosen: np.ndarray,  # [n] indices of rows
        starts: np.ndarray,  # [n] position where the history that counts begins
        vocab_size: int,
    ) -> np.ndarray:
        """Every token of the chosen rows' histories, as its index in the flattened logits of all `rows`; int64."""
        slots, num_known = rows.slots[chosen], self.state.num_tokens[rows.slots[chosen]]
        lengths = num_known - starts + rows.num_drafts[chosen]
        entry = np.repeat(np.arange(len(chosen)), lengths)
        offsets = np.arange(len(entry)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = starts[entry] + offsets
        token_ids = self.state.token_ids[slots[entry], np.minimum(positions, self.state.max_model_len - 1)]
        drafted = np.flatnonzero(positions >= num_known[entry])
        draft_index = (positions - num_known[entry])[drafted]
        token_ids[drafted] = rows.draft_token_ids[chosen[entry[drafted]], draft_index]
        return chosen[entry] * vocab_size + token_ids

    def _output_tail(self, rows: LogitsRows, row: int, length: int) -> np.ndarray:
        """The row's last `length` output tokens, or as many as there are."""
        slot = rows.slots[row]
        start, end = self.state.num_prompt_tokens[slot], self.state.num_tokens[slot]
        known = self.state.token_ids[slot, max(start, end - length) : end]
        output = np.concatenate([known, rows.draft_token_ids[row, : rows.num_drafts[row]]])
        return output[max(len(output) - length, 0) :]


def _mask(logits: torch.Tensor, rows: np.ndarray, token_ids: Sequence[np.ndarray]) -> None:
    if len(rows):
        logits.view(-1)[_flat_index(logits, rows, token_ids)] = -torch.inf


def _flat_index(logits: torch.Tensor, rows: np.ndarray, token_ids: Sequence[np.ndarray]) -> torch.Tensor:
    """Where `token_ids[i]` stand in row `rows[i]` of the flattened `logits`, one after the other."""
    starts = np.repeat(rows * logits.shape[1], [len(each) for each in token_ids])
    return _on(logits, starts + np.concatenate(token_ids))


def _on(logits: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(logits.device, non_blocking=True)
