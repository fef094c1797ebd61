"""What a forward pass of this machine costs, by its rows: measured, not assumed."""

import itertools

import numpy as np

KNOTS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192])
PACE_RATE = 0.06  # of one measurement, on all knots: a lasting change is followed within about 40 steps
SHAPE_RATE = 0.03  # the same on the knots around it alone, once they have been seen often
NUM_CALIBRATIONS = 3  # measurements that the calibration of a knot counts for
LARGEST_SURPRISE = 0.3  # of a measurement's logarithm: what a busy machine adds says little of its rows


class CostModel:
    """Seconds of a pass as a piecewise linear, non-decreasing function of its rows.

    Starts from a calibration and follows measured passes. One that takes longer than predicted makes all of them
    dearer, since it is mostly the machine that changes; and those of about as many rows by some more, where others are
    seen as well. So what rows cost beside one another stays known while all passes are alike. Between and beyond the
    calibrated knots it goes on with the nearest slope.

    Context is no term of its own: what it adds to a pass is the same with drafts and without, and moves the pace. So at
    long contexts added rows, which read the context of a row that is there, are taken for dearer than they are: fewer
    drafts, never a loss.
    """

    def __init__(self, rows: list[int], seconds: list[float]) -> None:
        assert len(rows) == len(seconds) >= 2
        assert all(earlier < later for earlier, later in itertools.pairwise(rows))
        measured = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
        inside = np.interp(KNOTS, rows, measured)
        slope = max((measured[-1] - measured[-2]) / (rows[-1] - rows[-2]), 0.0)
        self._seconds = np.where(rows[-1] < KNOTS, measured[-1] + slope * (KNOTS - rows[-1]), inside)
        self._num_seen = np.full(len(KNOTS), float(NUM_CALIBRATIONS))
        self._num_lately = np.zeros(len(KNOTS))  # the same, of about the last hundred measurements

    def seconds(self, rows: np.ndarray | int) -> np.ndarray:
        """Predicted seconds of passes with so many rows (0 rows cost nothing)."""
        rows = np.asarray(rows)
        return np.where(rows > 0, np.interp(rows, KNOTS, self._seconds), 0.0)

    def observe(self, rows: int, seconds: float) -> float:
        """Learns from a measured pass; returns the factor by which it has found the machine slower."""
        assert rows >= 1
        surprise = np.log(max(seconds, 1e-9) / float(self.seconds(rows)))
        surprise = float(np.clip(surprise, -LARGEST_SURPRISE, LARGEST_SURPRISE))
        upper = int(np.searchsorted(KNOTS, min(rows, KNOTS[-1])))
        lower = max(upper - 1, 0) if KNOTS[upper] != rows else upper
        share = 1.0 if upper == lower else float((rows - KNOTS[lower]) / (KNOTS[upper] - KNOTS[lower]))
        pace = float(np.exp(PACE_RATE * surprise))
        self.change_pace(pace)
        self._num_lately *= 0.99
        weights = {lower: 1 - share, upper: share}
        for knot, weight in weights.items():
            self._num_seen[knot] += weight
            self._num_lately[knot] += weight
        for knot, weight in weights.items():
            # Where nothing else is seen there is nothing to set it beside: it is all the machine's pace.
            rate = max(SHAPE_RATE, 1 / self._num_seen[knot]) * (1 - self._num_lately[knot] / self._num_lately.sum())
            self._seconds[knot] *= np.exp(weight * rate * surprise)
            # A pass never gets cheaper by more rows: what was learned of one knot bounds its neighbours.
            self._seconds[:knot] = np.minimum(self._seconds[:knot], self._seconds[knot])
            self._seconds[knot:] = np.maximum(self._seconds[knot:], self._seconds[knot])
        return pace

    def change_pace(self, factor: float) -> None:
        """All passes take so many times as long."""
        self._seconds *= factor
