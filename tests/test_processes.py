"""Work in forks of a process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tensoropt import processes
from tensoropt.processes import _can_fork, garbage_sought_seldom, in_forks

ROOT = Path(__file__).parents[1]


def succeeds(program: str) -> None:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, timeout=60, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_forks_answer_in_the_order_of_the_items():
    """In a process of its own, as test runners have threads."""
    program = """
import os, sys, time
from tensoropt import processes
from tensoropt.processes import in_forks
processes.cores = lambda: 2
parent = os.getpid()
seen = in_forks(lambda item: (item * item, os.getpid(), time.sleep(0.2 if item == 0 else 0.0)), range(5))
assert [one[0] for one in seen] == [0, 1, 4, 9, 16]
assert parent not in {one[1] for one in seen} and len({one[1] for one in seen}) == 5
assert [one[1] for one in in_forks(lambda item: (item, os.getpid()), [3])] == [parent]

# One that dies, or whose answer cannot be sent, is done here.
def dying(item):
    if item == 1 and os.getpid() != parent:
        os._exit(9)
    return (lambda: item) if item == 2 else item
first, second, third = in_forks(dying, range(3))
assert (first, second, third()) == (0, 1, 2)

# What is wrong is said here, and no fork is left.
def wrong(item):
    if item == 1:
        raise ValueError("one")
    time.sleep(60 if item else 0)
try:
    in_forks(wrong, range(3))
except ValueError as error:
    assert str(error) == "one"
else:
    raise AssertionError
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    sys.exit(0)
raise AssertionError
"""
    succeeds(program)


def test_forks_run_on_so_many_cores_at_a_time():
    program = """
import os, time
from tensoropt import processes
from tensoropt.processes import in_forks
processes.cores = lambda: 2
processes.end_with(os.getppid())  # as in a job of the dashboard
def span(item):
    began = time.monotonic()
    time.sleep(0.3)
    return began, time.monotonic()
spans = in_forks(span, range(4))
most = max(sum(b <= began < e for b, e in spans) for began, _ in spans)
assert most == 2, spans
"""
    succeeds(program)


def test_a_process_with_other_threads_or_cuda_does_all_itself(monkeypatch):
    import torch

    monkeypatch.setattr(processes, "_fork", None)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    stop = threading.Event()
    threading.Thread(target=stop.wait, name="another").start()
    try:
        assert not _can_fork()
        assert in_forks(abs, [-1, -2, -3]) == [1, 2, 3]
    finally:
        stop.set()
    monkeypatch.setattr(processes.threading, "enumerate", lambda: [threading.main_thread()])
    assert _can_fork()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not _can_fork()


@pytest.mark.parametrize("ended_by", ["SIGINT", "SIGKILL"])
def test_no_fork_outlives_the_process_that_was_ended(ended_by):
    program = """
import os, signal, time
from tensoropt import processes
processes.cores = lambda: 2
signal.signal(signal.SIGINT, signal.default_int_handler)
print(os.getpid(), flush=True)
processes.in_forks(lambda _: (os.write(1, b"forked\\n"), time.sleep(60)), range(4))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        assert process.stdout.readline().strip() == str(process.pid)
        assert [process.stdout.readline() for _ in range(2)] == ["forked\n"] * 2
        group = process.pid
        if ended_by == "SIGINT":
            os.killpg(group, signal.SIGINT)
        else:
            process.kill()
        _, error = process.communicate(timeout=20)  # ends when all have closed what they print to
    assert error.count("Traceback") == (ended_by == "SIGINT")
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is left")


def test_garbage_is_sought_seldom_only_during_the_block() -> None:
    before = gc.get_threshold()
    with garbage_sought_seldom():
        assert gc.get_threshold()[0] >= 100_000
    assert gc.get_threshold() == before
    try:
        gc.set_threshold(0)  # off, which stays so
        with garbage_sought_seldom():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_garbage_is_not_searched_for_in_what_is_in_memory() -> None:
    """In a process of its own: tests keep modules out of garbage collections themselves."""
    succeeds("""
import gc
from tensoropt.processes import not_searched_for_garbage as block
with block():
    assert gc.get_freeze_count()
assert not gc.get_freeze_count()
gc.freeze()
with block():
    pass
assert gc.get_freeze_count()  # somebody else's
""")
