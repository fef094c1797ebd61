"""What a chain of drafting modules hands on from pass to pass."""

import numpy as np
import torch

from app.engine.batch import select_rows, to_device


class DraftRows:
    """Outputs of a step's passes over rows that hold drafts, of the sequences that still draft."""

    def __init__(self, num_modules: int) -> None:
        self._num_modules = num_modules
        self._drafting = np.zeros(0, dtype=np.int64)
        self.outputs: list[torch.Tensor] = []  # of the last passes, at their last position: [num_seqs, hidden_size]
        # All rows of the last pass, the last of them at the end; [num_seqs, num_modules, hidden_size].
        self.newest = torch.zeros(0)

    def start(self, drafting: np.ndarray, outputs: torch.Tensor) -> None:
        self._drafting, self.outputs = drafting, [outputs]
        self.newest = outputs.unsqueeze(1).repeat(1, self._num_modules, 1) if self._num_modules > 1 else outputs

    def narrow(self, drafting: np.ndarray) -> None:
        """Goes on with some of the sequences."""
        if len(drafting) == len(self._drafting):
            return
        kept = np.searchsorted(self._drafting, drafting)
        self._drafting, self.newest = drafting, select_rows(self.newest, kept)
        self.outputs = [select_rows(each, kept) for each in self.outputs]

    def newest_of(self, num_rows: np.ndarray) -> torch.Tensor:
        """The last `num_rows` [num_seqs] of the newest, sequence by sequence."""
        return self.newest[self._is_among_last(num_rows)]

    def add(self, outputs: torch.Tensor, num_rows: np.ndarray) -> None:
        """A pass of `num_rows` [num_seqs] rows of each sequence."""
        last = outputs if len(outputs) == len(num_rows) else select_rows(outputs, np.cumsum(num_rows) - 1)
        self.outputs = [*self.outputs, last][-self._num_modules :]
        if self._num_modules > 1:
            self.newest[self._is_among_last(num_rows)] = outputs

    def _is_among_last(self, num_rows: np.ndarray) -> torch.Tensor:
        return to_device(np.arange(self._num_modules) >= self._num_modules - num_rows[:, None], self.newest.device)
