"""Pinning the ranks of a torchrun job in the same way as measured ranks, on which predictions rest."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from tensoropt.cluster import gpu_rank_cores, pin_rank, rank_cores

_undo: list[Callable[[], None]] = []
"""Undoes :func:`pin_process`. One per process, as cores and threads are."""


def pin(local_rank: int, local_ranks: int) -> Callable[[], None]:
    """Give this process one thread, of the batch class, on a core of its own if there are enough cores.

    Returns a function that undoes it.

    Args:
        local_rank, local_ranks: the rank among those of this host, and their number.
    """
    threads = torch.get_num_threads()
    cores = rank_cores(local_ranks, 1)
    go_back = pin_rank(cores[local_rank] if cores is not None else None)
    torch.set_num_threads(1)

    def undo() -> None:
        torch.set_num_threads(threads)
        go_back()

    return undo


def pin_gpu_rank(local_rank: int, local_ranks: int) -> Callable[[], None]:
    """Let this process run on the CPUs near its GPU, if they are known; return a function that undoes it."""
    cores = gpu_rank_cores(local_ranks)
    if cores is None:
        return lambda: None
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[local_rank])
    return lambda: os.sched_setaffinity(0, before)


def pin_process(device_type: str = "cpu") -> None:
    """Call :func:`pin` or :func:`pin_gpu_rank` once for this process, if torchrun's variables say which of
    its host's ranks it is."""
    if not _undo and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        of_device = pin if device_type == "cpu" else pin_gpu_rank
        _undo.append(of_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])))


def unpin_process() -> None:
    """Undo :func:`pin_process`."""
    while _undo:
        _undo.pop()()
