"""Work in forks of this process, which start with everything in memory that this process has.

Starting Python and loading PyTorch takes seconds, a fork some hundredths of a second. Forking is safe if no
other thread may hold a lock and CUDA was not initialised.
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
from operator import itemgetter
from typing import TypeVar, cast

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_LOOK_S = 0.5
"""The interval at which a process checks whether its parent is still there; an assumption."""
_SELDOM_OBJECTS = 100_000
"""The number of new objects between two collections: some 10 MB of them; an assumption."""
_WATCH = "end with parent"


def _can_fork() -> bool:
    """Return whether this process can be forked safely, and may have children."""
    # PyTorch's export leaves a thread of tqdm behind, which takes no lock but tqdm's own; ours takes none.
    harmless = ("tqdm_monitor", _WATCH)
    threads = [thread for thread in threading.enumerate() if thread.name not in harmless]
    torch = sys.modules.get("torch")
    with_cuda = torch is not None and torch.cuda.is_initialized()
    daemon = multiprocessing.current_process().daemon  # which may have no children
    return threads == [threading.main_thread()] and not with_cuda and not daemon


def cores() -> int:
    """Return the number of cores that this process may use, which taskset or a container can restrict."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def not_searched_for_garbage() -> Iterator[None]:
    """Exclude what is in memory now from garbage collection during the block, also in forks.

    Graphs and tables of a big model are millions of objects, which the search neither changes nor releases,
    and Python would traverse all of them again and again.
    """
    if gc.get_freeze_count():  # someone else has frozen it, and decides when that ends
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def garbage_sought_seldom() -> Iterator[None]:
    """Let Python look for cyclic garbage only after many new objects during the block, also in forks.

    An exploration makes millions of small objects that live long, hardly any of them in cycles; looking among
    the newest of them after every 700 took 15 % of GPT-2's.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: collections are off
        gc.set_threshold(max(before[0], _SELDOM_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def finished_when_interrupted() -> Iterator[list[bool]]:
    """Let the block finish although a person interrupts it (Ctrl-C), which the list yielded then says; a
    second interruption ends it. Other threads than the main one are never interrupted."""
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


def in_forks(work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Return ``work(item)`` for every item, in the order of the items; see :func:`_as_forks_end`."""
    return [answer for _, answer in sorted(_as_forks_end(work, items), key=itemgetter(0))]


def _as_forks_end(work: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[tuple[int, Answer]]:
    """Yield (number of the item, ``work(item)``) as results arrive from forks, one per core at a time.

    With one core or one item, or if this process cannot be forked, the work is done in this process. Changes
    that ``work`` makes in memory may or may not be seen, so it should make none. Its results are pickled.
    """
    if min(len(items), cores()) < 2 or not _can_fork():
        yield from enumerate(map(work, items))
        return
    running: dict[Connection, int] = {}
    with ExitStack() as stack:
        for number, item in enumerate(items):
            if len(running) == cores():
                yield from _ended(running, work, items)
            running[_fork(stack, work, item)] = number
        while running:
            yield from _ended(running, work, items)


def _ended(
    running: dict[Connection, int], work: Callable[[Item], Answer], items: Sequence[Item]
) -> Iterator[tuple[int, Answer]]:
    """Return the answers of the forks that have ended (at least one) by number, and remove these from
    ``running``."""
    for connection in cast("list[Connection]", wait(list(running))):
        number = running.pop(connection)
        try:
            answer = connection.recv()
        except (
            EOFError,
            OSError,
        ):  # it was ended, perhaps in mid-answer, or failed: what is wrong is said here
            answer = work(items[number])
        yield number, answer


def _fork(stack: ExitStack, work: Callable[[Item], Answer], item: Item) -> Connection:
    """Start a fork and return the connection on which it sends ``work(item)``.

    The fork ends with the stack, whatever it is doing, and when its parent ends.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, item, receiving, sending, os.getpid()), daemon=True)
    process.start()
    sending.close()  # so that the answer ends when the fork does
    for end in (process.join, process.kill, receiving.close):
        stack.callback(end)
    return receiving


def _send(
    work: Callable[[Item], Answer], item: Item, receiving: Connection, sending: Connection, parent: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    receiving.close()  # so that nobody reads what is sent when the parent is gone
    end_with(parent)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # threads of PyTorch's operators do not survive a fork
    try:
        sending.send(work(item))
    except BaseException:
        os._exit(1)  # the parent does the work itself


def end_with(parent: int) -> None:
    """End this process as soon as its parent, given by process id, is gone."""

    def watch() -> None:
        while os.getppid() == parent:  # a process whose parent has died gets another parent
            time.sleep(_LOOK_S)
        # Without destructors: they may wait for processes that nobody will end.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_WATCH).start()
