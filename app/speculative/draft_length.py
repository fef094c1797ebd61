"""How many drafts a sequence may have in a step."""

from app.engine.sequence import Sequence


class FixedDraftLength:
    """The server's number, or the request's where that is smaller. The server's may be set between steps."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def __call__(self, sequence: Sequence) -> int:
        own = sequence.sampling_params.num_speculative_tokens
        return self.num_speculative_tokens if own is None else min(own, self.num_speculative_tokens)
