"""CPU ranks of a torchrun job, pinned as ranks are when they are measured, which predictions rest on."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from tensoropt.cluster import pin_rank, rank_cores

_undo: list[Callable[[], None]] = []
"""What takes back what :func:`pin_process` did. Of the process, as its cores and threads are."""


def pin(local_rank: int, local_ranks: int) -> Callable[[], None]:
    """Give this process one thread, of the batch class, on a core of its own where there are enough.

    Returns what undoes it.

    Args:
        local_rank, local_ranks: among the ranks of this host.
    """
    threads = torch.get_num_threads()
    cores = rank_cores(local_ranks, 1)
    go_back = pin_rank(cores[local_rank] if cores is not None else None)
    torch.set_num_threads(1)

    def undo() -> None:
        torch.set_num_threads(threads)
        go_back()

    return undo


def pin_process() -> None:
    """:func:`pin` this process, once, where torchrun says which of its host's ranks it is."""
    if not _undo and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        _undo.append(pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])))


def unpin_process() -> None:
    """Take back what :func:`pin_process` did."""
    while _undo:
        _undo.pop()()
