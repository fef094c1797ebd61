"""A call in a thread that ends with it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_own_thread(function: Callable[[], Result]) -> "Future[Result]":
    """For what computes once beside the thread that computes for good, such as loading and timing a model.

    OpenMP, which torch's operators compute by, keeps a team for every thread that has called one, and the team's
    threads wait awake for the next call only while all teams together fit the cores. Where those operators carry out
    the steps, a team that is left behind puts the steps' own to sleep between two calls, at twice the time of a step;
    it goes with its thread. An executor's thread would do as well, but for the interpreter's end, which waits for it:
    Ctrl-C is not to wait for a download.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="own", daemon=True).start()
    return future
