"""Suffix matches and what they agree on, as their definitions read."""

from app.speculative.suffix import MAX_MATCH_LENGTH


def match_length(text: list[int], ending: list[int]) -> int:
    """Tokens at the end of both that are the same, at most MAX_MATCH_LENGTH."""
    length = 0
    for a, b in zip(reversed(text[-MAX_MATCH_LENGTH:]), reversed(ending), strict=False):
        if a != b:
            break
        length += 1
    return length


def agreed_continuation(continuations: list[list[int]]) -> tuple[list[int], list[bool]]:
    """The continuation that all, itself included, share the most tokens with; the first in a tie.

    Beside it, for each token, whether all that said the same so far, and go on, say it.
    """

    def shared(a: list[int], b: list[int]) -> int:
        return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))

    best = max(continuations, key=lambda one: sum(shared(one, other) for other in continuations))
    unanimous = [all(shared(best, other) != i for other in continuations if len(other) > i) for i in range(len(best))]
    return best, unanimous
