"""Hidden states of the target that a drafter has not been run over yet."""

from dataclasses import dataclass

import numpy as np
import torch

from app.engine.batch import select_rows


@dataclass(frozen=True)
class SlotRows:
    """Rows at consecutive positions of some slots, one after the other."""

    hidden_states: torch.Tensor  # [sum(num_rows), hidden_size]
    slots: np.ndarray  # [n] int64, each once
    num_rows: np.ndarray  # [n] int64

    def cut(self, num_rows: np.ndarray) -> "SlotRows":
        """The last `num_rows` [n] of each slot, which has no fewer; slots of 0 are left out."""
        if (num_rows == self.num_rows).all():
            return self
        from_end = np.repeat(np.cumsum(self.num_rows), self.num_rows) - np.arange(len(self.hidden_states))
        rows, kept = np.flatnonzero(from_end <= np.repeat(num_rows, self.num_rows)), num_rows > 0
        return SlotRows(select_rows(self.hidden_states, rows), self.slots[kept], num_rows[kept])


class HeldRows:
    """Rows of several steps, by slot.

    A slot's rows stand at consecutive positions, the last of them at its last computed one. Some may have been run
    over already, and are kept for what the next ones need of them: only the others are counted as new.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_new = np.zeros(max_num_seqs, dtype=np.int64)
        self._steps: list[SlotRows] = []

    def add(self, rows: SlotRows) -> None:
        """Rows of one step."""
        self._steps.append(rows)
        self.num_new[rows.slots] += rows.num_rows

    def drop(self, dropped: list[int]) -> None:
        """Lets go of all rows of some slots."""
        self.num_new[dropped] = 0
        if self._steps and dropped:
            rows = self._together()
            self._keep(rows, np.where(np.isin(rows.slots, dropped), 0, rows.num_rows))

    def take(self, num_kept: int) -> SlotRows:
        """All rows. The last `num_kept` of each slot stay, and are no longer new."""
        rows = self._together()
        self.num_new[:] = 0
        self._keep(rows, np.minimum(rows.num_rows, num_kept))
        return rows

    def _together(self) -> SlotRows:
        if len(self._steps) == 1:
            return self._steps[0]
        row_slots = np.concatenate([np.repeat(step.slots, step.num_rows) for step in self._steps])
        order = np.argsort(row_slots, kind="stable")
        slots, num_rows = np.unique(row_slots, return_counts=True)
        return SlotRows(select_rows(torch.cat([step.hidden_states for step in self._steps]), order), slots, num_rows)

    def _keep(self, rows: SlotRows, num_rows: np.ndarray) -> None:
        self._steps = [rows.cut(num_rows)] if num_rows.any() else []
