"""How many threads the compiled kernels run on: one number for the process, as there is one team of them."""

import torch

_chosen: int | None = None


def num_threads() -> int:
    """What was chosen; until then as many as torch's own operators."""
    return _chosen or torch.get_num_threads()


def set_num_threads(num: int) -> None:
    """For the calls of all threads from now on; leaves torch's own operators one.

    Theirs are other threads. Those of either kind stay awake between two calls, and would take the cores from one
    another.
    """
    global _chosen
    _chosen = num
    torch.set_num_threads(1)
