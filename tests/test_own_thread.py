"""A call in a thread that ends with it."""

import threading

import pytest

from app.own_thread import run_in_own_thread


def test_a_call_has_its_result_and_its_thread_is_gone() -> None:
    threads: list[threading.Thread] = []

    def compute() -> int:
        threads.append(threading.current_thread())
        return 7

    assert run_in_own_thread(compute).result(timeout=30) == 7
    assert threads[0] is not threading.current_thread()
    threads[0].join(timeout=30)
    assert not threads[0].is_alive()


def test_what_a_call_raises_is_raised_to_whoever_waits() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        run_in_own_thread(fail).result(timeout=30)
