"""Hidden states of the target that a drafter has not been run over yet."""

import numpy as np
import torch

from app.engine.batch import select_rows


class HeldRows:
    """Rows of several steps, by slot.

    A slot's rows stand at consecutive positions, the last of them at its last computed one. Some may have been run
    over already, and are kept for what the next ones need of them: only the others are counted as new.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_new = np.zeros(max_num_seqs, dtype=np.int64)
        self._steps: list[tuple[torch.Tensor, np.ndarray]] = []  # hidden states, and each row's slot; slot by slot

    def add(self, hidden_states: torch.Tensor, slots: np.ndarray) -> None:
        """Rows [n, hidden_size] of one step, of the sequences at `slots` [n], one after the other."""
        self._steps.append((hidden_states, slots))
        self.num_new += np.bincount(slots, minlength=len(self.num_new))

    def drop(self, dropped: list[int]) -> None:
        """Lets go of all rows of some slots."""
        self.num_new[dropped] = 0
        if self._steps and dropped:
            hidden_states, slots = self._together()
            self._steps = []
            self._keep(hidden_states, slots, ~np.isin(slots, dropped))

    def take(self, num_kept: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """All rows, slot by slot; the slots, and how many rows each has. The last `num_kept` of each stay, not new."""
        hidden_states, slots = self._together()
        self._steps = []
        self.num_new[:] = 0
        firsts = np.flatnonzero(np.diff(slots, prepend=-1))
        num_rows = np.diff(firsts, append=len(slots))
        if num_kept:
            self._keep(hidden_states, slots, np.repeat(firsts + num_rows, num_rows) - np.arange(len(slots)) <= num_kept)
        return hidden_states, slots[firsts], num_rows

    def _together(self) -> tuple[torch.Tensor, np.ndarray]:
        if len(self._steps) == 1:
            return self._steps[0]
        states, slots = zip(*self._steps, strict=True)
        together = np.concatenate(slots)
        order = np.argsort(together, kind="stable")
        return select_rows(torch.cat(states), order), together[order]

    def _keep(self, hidden_states: torch.Tensor, slots: np.ndarray, kept: np.ndarray) -> None:
        if kept.all():
            self._steps.append((hidden_states, slots))
        elif kept.any():
            self._steps.append((select_rows(hidden_states, np.flatnonzero(kept)), slots[kept]))
