"""Says so in the log when drafts are hardly ever kept: nothing else shows that a drafter is broken."""

import logging

from app.engine.outputs import SpeculationStats

logger = logging.getLogger(__name__)


class AcceptanceWatch:
    """Looks at every `window` first drafts of all sequences together; each fall below `floor` is told once.

    First drafts, because later ones count only where those before them are kept. A drafter that is given the wrong
    hidden states keeps about 1% of them, and one that fits keeps 13% even of random text.
    """

    def __init__(self, floor: float = 0.1, window: int = 1000) -> None:
        assert 0 < floor < 1
        assert window >= 1
        self._floor, self._window = floor, window
        self._num_drafted = self._num_accepted = 0  # at the end of the last window
        self._is_low = False

    def observe(self, stats: SpeculationStats) -> None:
        """Sees the running counts, which never go down."""
        if not stats.drafted_per_position:
            return
        num_drafted = stats.drafted_per_position[0] - self._num_drafted
        if num_drafted < self._window:
            return
        rate = (stats.accepted_per_position[0] - self._num_accepted) / num_drafted
        self._num_drafted, self._num_accepted = stats.drafted_per_position[0], stats.accepted_per_position[0]
        was_low, self._is_low = self._is_low, rate < self._floor
        if self._is_low and not was_low:
            logger.warning(
                "Of the last %d first drafts %.1f%% were kept, below %.0f%%: they cost more than they save. Check that "
                "the drafter belongs to this target; if it does, the text is not predictable: lower "
                "num_speculative_tokens or set it to auto",
                num_drafted,
                100 * rate,
                100 * self._floor,
            )
