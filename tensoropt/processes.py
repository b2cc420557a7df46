"""Functions that compute in forks of this process, which share its memory at no cost.

Starting Python and loading PyTorch takes seconds, a fork some hundredths of a second. Forking is safe if no
other thread may hold a lock and CUDA is not initialised.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import TypeVar, cast

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_LOOK_S = 0.5
"""The seconds between a process's checks that its parent is alive; an assumption."""
_SELDOM_OBJECTS = 100_000
"""The number of new objects between two garbage collections, some 10 MB; an assumption."""
_WATCH = "end with parent"


def _can_fork() -> bool:
    """Return whether this process may be forked: no other threads, no CUDA, and allowed to have children."""
    # PyTorch's export leaves a thread of tqdm, which takes only tqdm's own lock; ours takes none.
    harmless = ("tqdm_monitor", _WATCH)
    threads = [thread for thread in threading.enumerate() if thread.name not in harmless]
    torch = sys.modules.get("torch")
    with_cuda = torch is not None and torch.cuda.is_initialized()
    daemon = multiprocessing.current_process().daemon  # daemons may have no children
    return threads == [threading.main_thread()] and not with_cuda and not daemon


def cores() -> int:
    """Return the number of cores that this process may use, as restricted by taskset or a container."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def not_searched_for_garbage() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection during the block, in forks too.

    A big model's graphs and tables are millions of objects that a search neither changes nor releases, and
    Python would traverse them again and again.
    """
    if gc.get_freeze_count():  # already frozen elsewhere, which decides when that ends
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def garbage_sought_seldom() -> Iterator[None]:
    """Run Python's garbage collection less often during the block, in forks too: after 100,000 new objects.

    An exploration makes millions of small, long-lived objects, hardly any in cycles; a collection after every
    700 new objects took 15 % of GPT-2's time.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: collection is off
        gc.set_threshold(max(before[0], _SELDOM_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def finished_when_interrupted() -> Iterator[list[bool]]:
    """Let the block finish despite a first Ctrl-C, which only appends to the yielded list; a second Ctrl-C
    interrupts the block. Outside of the main thread, which alone gets Ctrl-C, nothing is changed."""
    interrupted: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: object) -> None:
        interrupted.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def in_forks(work: Callable[[_Item], _Answer], items: Sequence[_Item]) -> list[_Answer]:
    """Return ``work(item)`` for every item, in order, computed in forked processes, one per core at a time.

    With one core or one item, or if forking is unsafe, the work runs in this process. ``work`` should not
    change memory, since changes in forks are lost. Results are pickled.
    """
    if min(len(items), cores()) < 2 or not _can_fork():
        return list(map(work, items))
    running: dict[Connection, int] = {}
    answers: dict[int, _Answer] = {}
    with ExitStack() as stack:
        for number, item in enumerate(items):
            if len(running) == cores():
                answers |= _ended(running, work, items)
            running[_fork(stack, work, item)] = number
        while running:
            answers |= _ended(running, work, items)
    return [answers[number] for number in range(len(items))]


def _ended(
    running: dict[Connection, int], work: Callable[[_Item], _Answer], items: Sequence[_Item]
) -> dict[int, _Answer]:
    """Wait until at least one fork ends, take it from ``running``, and return the results by item number."""
    answers = {}
    for connection in cast("list[Connection]", wait(list(running))):
        number = running.pop(connection)
        try:
            answers[number] = connection.recv()
        except (EOFError, OSError):  # the fork was killed or failed: doing its work here shows the error
            answers[number] = work(items[number])
    return answers


def _fork(stack: ExitStack, work: Callable[[_Item], _Answer], item: _Item) -> Connection:
    """Start a fork that computes ``work(item)``, and return the connection from which the result can be
    received.

    The fork is killed when the stack closes, and ends by itself when this process does.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, item, receiving, sending, os.getpid()), daemon=True)
    process.start()
    sending.close()  # so that the connection closes when the fork ends
    for end in (process.join, process.kill, receiving.close):
        stack.callback(end)
    return receiving


def _send(
    work: Callable[[_Item], _Answer], item: _Item, receiving: Connection, sending: Connection, parent: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    receiving.close()  # so that sending fails once the parent is gone
    end_with(parent)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # threads of PyTorch's operators do not survive a fork
    try:
        sending.send(work(item))
    except BaseException:
        os._exit(1)  # the parent does the work itself


def end_with(parent: int) -> None:
    """Start a thread that ends this process as soon as its parent, given by process id, is gone."""

    def watch() -> None:
        while os.getppid() == parent:  # an orphan gets another parent
            time.sleep(_LOOK_S)
        # Without destructors, which may wait for processes that nobody ends.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_WATCH).start()
