"""How many drafts a sequence may have in a step, as far as the server is concerned."""

from app.engine.sequence import Sequence


class FixedDraftLength:
    """The same for every sequence; it may be set between steps. What a request asks for, the scheduler sees to."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def __call__(self, sequence: Sequence) -> int:
        return self.num_speculative_tokens
