"""The team of threads that computes the compiled kernels' tasks.

Each test is a process of its own: a team lives as long as its process.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.compiler import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

ROOT = Path(__file__).parent.parent
PRELUDE = """
import os, threading, time
import torch
from kernels import ops
from kernels.cpu import ops as cpu_ops

ops.set_num_threads(2, torch.float32)
x = torch.randn(100, 256, generator=torch.Generator().manual_seed(0))
packed = cpu_ops.pack_weight(torch.randn(2000, 256, generator=torch.Generator().manual_seed(1)))
threads_before = set(os.listdir("/proc/self/task"))

def compute():
    return cpu_ops.linear(x, packed)

def helpers_time():
    helpers = set(os.listdir("/proc/self/task")) - threads_before
    return sum(int(open(f"/proc/self/task/{task}/schedstat").read().split()[0]) for task in helpers)

def wait_for_help():
    start, deadline = helpers_time(), time.monotonic() + 60
    while helpers_time() - start < 2e6:
        compute()
        assert time.monotonic() < deadline, "no other thread has computed"
"""


def run(script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_helper_computes_sleeps_and_comes_back() -> None:
    run("""
expected = compute()
wait_for_help()
time.sleep(0.2)  # it has gone to sleep by now
idle = helpers_time()
time.sleep(0.3)
assert helpers_time() - idle < 1e8, "a thread that nobody needs keeps a core"
wait_for_help()
assert torch.equal(compute(), expected)
""")


def test_others_compute_and_a_call_ends_when_all_who_came_have_left() -> None:
    run("""
import ctypes
from kernels.cpu.calls import loaded_library

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
split = loaded_library().released.run_on_threads
split.argtypes = (ctypes.c_int64, BODY, ctypes.c_void_p)

def call(num_threads):
    inside, entered, left, all_in = set(), 0, 0, threading.Event()

    def body(_):
        nonlocal entered, left
        if all_in.is_set():  # nothing is left to do
            return
        entered += 1
        inside.add(threading.get_native_id())
        if entered == num_threads:
            all_in.set()
        assert all_in.wait(60)
        time.sleep(0.0 if threading.get_native_id() == os.getpid() else 0.1)  # the caller is done first
        left += 1

    split(num_threads, BODY(body), None)
    assert (entered, left, len(inside)) == (num_threads,) * 3, (entered, left, inside)

call(4)
call(2)  # of a team of four
call(4)
""")


def test_threads_that_call_at_once_each_get_their_own_result() -> None:
    run("""
inputs = [x + i for i in range(4)]
expected = [cpu_ops.linear(rows, packed) for rows in inputs]
wrong = []

def call(i):
    for _ in range(200):
        if not torch.equal(cpu_ops.linear(inputs[i], packed), expected[i]):
            wrong.append(i)

callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
assert not wrong
""")


def test_the_child_of_a_fork_has_a_team_of_its_own() -> None:
    run("""
expected = compute()
wait_for_help()
child = os.fork()
if child == 0:
    threads_before = set(os.listdir("/proc/self/task"))
    wait_for_help()
    os._exit(0 if torch.equal(compute(), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(compute(), expected)
""")


def test_operators_of_torch_get_the_threads_where_they_do_the_work() -> None:
    run("""
from kernels.cpu import threads
assert (threads.num_threads(), torch.get_num_threads()) == (2, 1)
ops.set_num_threads(None, torch.float16)
assert torch.get_num_threads() == 2
ops.set_num_threads(3, torch.bfloat16)
assert (threads.num_threads(), torch.get_num_threads()) == (3, 1)
""")
