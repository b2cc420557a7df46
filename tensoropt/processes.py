"""Work in forks of this process, which have everything in memory that this one has.

To start Python and load PyTorch takes seconds, a fork some hundredths of one. It is safe where no other
thread may hold a lock, and where CUDA was not initialised.
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
from functools import partial
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

LOOK_S = 0.5
"""How often a fork looks whether its parent is still there; an assumption."""


def can_fork() -> bool:
    """Whether this process can be forked safely, and may have children."""
    # PyTorch's export leaves a thread of tqdm behind, which takes no lock but tqdm's own.
    threads = [thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"]
    torch = sys.modules.get("torch")
    with_cuda = torch is not None and torch.cuda.is_initialized()
    daemon = multiprocessing.current_process().daemon  # which may have no children
    return threads == [threading.main_thread()] and not with_cuda and not daemon


def cores() -> int:
    """Cores that this process may use, which taskset or a container can make fewer than there are."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def not_searched_for_garbage() -> Iterator[None]:
    """What is in memory now is not looked through for garbage in the block, nor in its forks.

    Graphs and tables of a big model are millions of objects, which the search neither changes nor lets go of,
    and Python would go through all of them again and again.
    """
    if gc.get_freeze_count():  # somebody else's, who decides when it ends
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def in_forks(work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """``work`` of every item, as :func:`as_forks_end` does it, in the order of the items."""
    return [answer for _, answer in sorted(as_forks_end(work, items), key=itemgetter(0))]


def as_forks_end(work: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[tuple[int, Answer]]:
    """The number of each item with ``work`` of it, as they come: in forks, one per core at a time; here where
    there is one core or one item, or where this process cannot be forked.

    What ``work`` changes in memory may be seen or not, so that it should change nothing. What it returns is
    pickled.
    """
    if min(len(items), cores()) < 2 or not can_fork():
        yield from enumerate(map(work, items))
        return
    running: dict[Connection, tuple[int, Fork[Answer]]] = {}
    with ExitStack() as stack:
        for number, item in enumerate(items):
            if len(running) == cores():
                yield from _ended(running)
            fork = stack.enter_context(Fork(partial(work, item)))
            running[fork.connection] = number, fork
        while running:
            yield from _ended(running)


def _ended(running: dict[Connection, tuple[int, Fork[Answer]]]) -> Iterator[tuple[int, Answer]]:
    """The answers of forks that have ended, at least one, by number; they are taken from those that run."""
    for connection in wait(list(running)):
        number, fork = running.pop(connection)  # type: ignore[call-overload]
        yield number, fork.answer()


class Fork(Generic[Answer]):
    """A fork of this process that does one piece of work.

    As a context manager it is ended at the end of the block, whatever it does; it also ends when its parent
    does.

    Attributes:
        connection: on which the answer comes.
    """

    def __init__(self, work: Callable[[], Answer]):
        self.work = work
        context = multiprocessing.get_context("fork")
        self.connection, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=self._run, args=(sending, os.getpid()), daemon=True)
        self._process.start()
        sending.close()  # so that the answer ends when the fork does

    def _run(self, sending: Connection, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
        self.connection.close()  # so that nobody reads what is sent when the parent is gone
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # threads of PyTorch's operators do not survive a fork
        try:
            sending.send(self.work())
        except BaseException:
            os._exit(1)  # the parent does the work itself, and says what is wrong

    def answer(self) -> Answer:
        """What the fork found; found here where it was ended or failed."""
        try:
            return self.connection.recv()
        except EOFError:
            return self.work()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join()


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
