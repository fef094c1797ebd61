"""What a draft-length controller has decided, and what came of it."""

from dataclasses import dataclass


@dataclass
class ControllerTotals:
    """What the controller has decided so far; seconds are measured, the gains predicted.

    Rates and gains are those of steps without prompt chunks, whose time is not the drafts' alone.
    """

    num_decisions: int = 0
    num_plain: int = 0  # decisions for no drafts at all
    num_explorations: int = 0
    exploration_s: float = 0.0
    total_s: float = 0.0
    predicted_tokens: float = 0.0  # at the predicted rates, in the measured time
    plain_tokens: float = 0.0  # at the rate predicted for plain decoding, in the measured time
    emitted_tokens: int = 0

    @property
    def predicted_gain(self) -> float:
        """Tokens per second expected, over those of plain decoding."""
        return self.predicted_tokens / self.plain_tokens if self.plain_tokens else 1.0

    @property
    def measured_gain(self) -> float:
        """Tokens per second measured, over those predicted for plain decoding."""
        return self.emitted_tokens / self.plain_tokens if self.plain_tokens else 1.0
