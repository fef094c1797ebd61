"""What one step, and one sequence, may hold."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """Raises ValueError where a step could not hold one token of every sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int  # rows of one step
    max_model_len: int  # prompt and output together

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs, {self.max_num_seqs}: "
                "a step must hold one token of every sequence; raise the first or lower the second"
            )
