"""How long a device works on something: asked alike of devices that are waited for and of those that are not.

A CPU rank has done its work when the call returns, so a clock is read before and after. A GPU is only told
what to do: events go into its queue before and after, all repeats are issued, and the events are read once
everything is done. Reading after each repeat would add the way to the GPU and back to each.

What lies between two events is what the queue saw: where Python issues kernels more slowly than the GPU runs
them, the gaps count, as they do in a step of the executor.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import Any, Protocol

import torch
import torch.distributed as dist

CACHE_BYTES = 24 * 2**20
"""Of the copies of a workload that a CPU rank visits in turn, so that none is timed on a cache it would not
find. Reading other data before each repeat instead would cost small operators their code and page tables as
well: five times the seconds that they take in a step. How much fills a cache is an assumption."""
MOST_COPIES = 32
"""Small workloads would need thousands of copies; an assumption, which bounds the time to make them."""
GPU_CACHE_BYTES = 64 * 2**20
"""Taken for a GPU's L2 where PyTorch does not tell its size; an A100 has 40 MB, an H100 50 MB."""
_LOST_DEVICE = 70  # exit code of a rank whose device answers no more

Mark = Any
"""A moment on a device's clock; only the timer that made it can read it."""


class DeviceTimer(Protocol):
    """Times one device.

    Attributes:
        device: where the tensors that are timed lie.
        most_repeats: how often a workload is repeated at most.
        also_warm: whether laps on warm caches are timed too, beside the cold ones that count.
    """

    device: torch.device
    most_repeats: int
    also_warm: bool

    def copies(self, size_bytes: int) -> int:
        """How many copies of a workload's tensors, so large each, are visited in turn."""
        ...

    def leave_cache(self) -> None:
        """Touch other data, as the rest of a step does between two visits to an operator's tensors, where
        the copies do not see to that."""
        ...

    def mark(self) -> Mark:
        """The moment when what was asked of the device so far is done."""
        ...

    def seconds(self, spans: Sequence[tuple[Mark, Mark]]) -> list[float]:
        """Seconds between the marks of each span; waits until the last is there."""
        ...

    def release(self) -> None:
        """Give back memory after a workload that had too little."""
        ...

    def works(self) -> bool:
        """Whether the device still answers; after some errors of a kernel it never does in this process."""
        ...


class WallTimer:
    """Times a CPU rank by the clock."""

    device = torch.device("cpu")
    most_repeats = 96  # an assumption
    also_warm = False

    def copies(self, size_bytes: int) -> int:
        return min(MOST_COPIES, ceil(CACHE_BYTES / max(size_bytes, 1)))

    def leave_cache(self) -> None:
        """Nothing: the copies lie as far apart as the tensors of a step."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        return [end - start for start, end in spans]

    def release(self) -> None:
        """Nothing: what a CPU rank frees stays its own (:mod:`tensoropt.ranks.allocator`)."""

    def works(self) -> bool:
        return True


class EventTimer:
    """Times a GPU by events in its current stream.

    Cold means that twice the L2's size was zeroed just before (a write of just its size leaves some of it).
    The cold figure is the one that counts: between two visits to an operator's tensors a step moves more than
    any L2 holds. What a workload itself leaves in L2 for its later calls, it finds there.

    Args:
        device: such as ``cuda:0``.
        cuda: what has ``torch.cuda``'s functions.
    """

    # An assumption.
    most_repeats = 50
    also_warm = True

    def __init__(self, device: str | torch.device, cuda: Any = torch.cuda):
        self.device = torch.device(device)
        self._cuda = cuda
        self._other: torch.Tensor | None = None

    @property
    def cache_bytes(self) -> int:
        """Of the L2."""
        return getattr(self._cuda.get_device_properties(self.device), "L2_cache_size", 0) or GPU_CACHE_BYTES

    def copies(self, size_bytes: int) -> int:
        """One: zeroing costs a GPU little, and leaves what runs on the host alone."""
        return 1

    def leave_cache(self) -> None:
        if self._other is None:
            self._other = torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=self.device)
        self._other.zero_()

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        self._cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in spans]  # PyTorch gives milliseconds

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that does not answer any more
            self._cuda.empty_cache()

    def works(self) -> bool:
        try:
            self._cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True


def end_if_lost(timer: DeviceTimer, what: str) -> None:
    """End this rank if its device does not answer any more, as after some errors of a kernel: it would not as
    long as the process lives. The pool starts another, and learns from its death which work did it."""
    if not timer.works():
        print(what, file=sys.stderr, flush=True)
        # Without Python's clean-up, which might wait for the device for ever.
        os._exit(_LOST_DEVICE)


def local_timer() -> DeviceTimer:
    """The timer of this rank's device: its GPU where ranks talk over nccl, else its processor."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return timer_of(f"cuda:{torch.cuda.current_device()}")
    return timer_of("cpu")


@cache
def timer_of(device: str) -> DeviceTimer:
    """The timer of a device of this process, always the same one."""
    return WallTimer() if device == "cpu" else EventTimer(device)
