"""A call in a thread that ends with it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_own_thread(function: Callable[[], Result]) -> "Future[Result]":
    """For what computes once beside the thread that computes for good, such as loading and timing a model.

    OpenMP keeps a team for every thread that has computed, and its threads wait awake for the next kernel only while
    all teams together fit the cores. A team that is left behind puts those of every later step to sleep between two
    kernels, at twice the time of a step; it goes with its thread. An executor's thread would do as well, but for the
    interpreter's end, which waits for it: Ctrl-C is not to wait for a download.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="own", daemon=True).start()
    return future
