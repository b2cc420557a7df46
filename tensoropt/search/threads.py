"""The number of threads, and the division of work among them.

The kernels release Python's lock, so threads of one process use all cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

Found = TypeVar("Found")


def thread_count(threads: int | None) -> int:
    """The requested number of threads; by default one per core."""
    # The cores that this process may use; taskset or a container can restrict them.
    return max(1, threads if threads is not None else len(os.sched_getaffinity(0)))


def in_parts(function: Callable[[int, int], Found], size: int, threads: int, least: int = 1) -> list[Found]:
    """``function(first, last)`` for as many parts of ``range(size)`` as there are threads, in their order.

    Args:
        least: a part smaller than this is not worth a thread.
    """
    parts = max(1, min(threads, size // max(least, 1)))
    spans = list(pairwise([size * i // parts for i in range(parts + 1)]))
    if parts == 1:
        return [function(*spans[0])]
    with ThreadPoolExecutor(parts) as pool:
        return [job.result() for job in [pool.submit(function, *span) for span in spans]]
