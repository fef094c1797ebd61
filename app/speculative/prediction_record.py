"""How far predictions have come true."""


class PredictionRecord:
    """What came of predictions that were acted upon, over what was predicted.

    The best of many predictions are too good more often than not. What was learned fades step by step, since where
    nothing is believed nothing is judged.
    """

    def __init__(self, weight: float, decay: float) -> None:
        self._weight = weight  # predicted in total, so much that predictions are believed for
        self._decay = decay  # of what is known, a step
        self._actual = self._predicted = 0.0

    @property
    def ratio(self) -> float:
        return (self._actual + self._weight) / (self._predicted + self._weight)

    def observe(self, actual: float, predicted: float) -> None:
        """Of one step; zeros where nothing was acted upon."""
        self._actual = self._decay * self._actual + actual
        self._predicted = self._decay * self._predicted + predicted
