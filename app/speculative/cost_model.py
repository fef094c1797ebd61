"""What a forward pass of this machine costs, by its rows: measured, not assumed."""

import itertools

import numpy as np

KNOTS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192])
LEARNING_RATE = 0.08  # of one measurement; a knot follows a lasting change within about 25 steps
LARGEST_SURPRISE = 2.0  # a pass counts as at most this times its prediction: a hiccup says little of its rows


class CostModel:
    """Seconds of a pass as a piecewise linear, non-decreasing function of its rows.

    Starts from a calibration and follows measured passes. Between and beyond the calibrated knots it goes on
    with the nearest slope.
    """

    def __init__(self, rows: list[int], seconds: list[float]) -> None:
        assert len(rows) == len(seconds) >= 2
        assert all(earlier < later for earlier, later in itertools.pairwise(rows))
        measured = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
        inside = np.interp(KNOTS, rows, measured)
        slope = max((measured[-1] - measured[-2]) / (rows[-1] - rows[-2]), 0.0)
        self._seconds = np.where(rows[-1] < KNOTS, measured[-1] + slope * (KNOTS - rows[-1]), inside)

    def seconds(self, rows: np.ndarray | int) -> np.ndarray:
        """Predicted seconds of passes with so many rows (0 rows cost nothing)."""
        rows = np.asarray(rows)
        return np.where(rows > 0, np.interp(rows, KNOTS, self._seconds), 0.0)

    def observe(self, rows: int, seconds: float) -> None:
        """Moves the two knots around `rows` towards a measured pass."""
        assert rows >= 1
        predicted = float(self.seconds(rows))
        error = min(seconds, LARGEST_SURPRISE * predicted) - predicted
        upper = int(np.searchsorted(KNOTS, min(rows, KNOTS[-1])))
        lower = max(upper - 1, 0) if KNOTS[upper] != rows else upper
        weight = 1.0 if upper == lower else (rows - KNOTS[lower]) / (KNOTS[upper] - KNOTS[lower])
        self._seconds[upper] += LEARNING_RATE * weight * error
        if lower != upper:
            self._seconds[lower] += LEARNING_RATE * (1 - weight) * error
        # A pass never gets cheaper by more rows: what was learned of one knot bounds its neighbours.
        for knot in (lower, upper):
            self._seconds[:knot] = np.minimum(self._seconds[:knot], self._seconds[knot])
            self._seconds[knot:] = np.maximum(self._seconds[knot:], self._seconds[knot])
