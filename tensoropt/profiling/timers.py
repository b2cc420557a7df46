"""Timers of work on a device, with one interface for CPUs and GPUs.

Events time a GPU. A sleeping kernel before them keeps it busy until the host has launched all work, so that
launch gaps do not count; the host's time is recorded separately
(:class:`~tensoropt.simulate.simulator.StepMetrics`). On CPUs the fastest repeat that did not wait for a core
counts, as other programs only make work longer; on GPUs the median.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_CACHE_BYTES = 24 * 2**20
"""The size in bytes of the copies that a CPU rank visits in turn to leave its cache; an assumption."""
_MOST_COPIES = 32
"""The most copies of a small workload; an assumption."""
_GPU_CACHE_BYTES = 64 * 2**20
"""The assumed size of a GPU's L2 if PyTorch does not report it; an A100 has 40 MB, an H100 50 MB."""
_LOST_DEVICE = 70  # exit code of a rank whose device no longer answers

_MOST_LEAD_S = 0.1
"""The longest time that a GPU is kept busy before timed work begins; an assumption."""
_LEAST_LEAD_S = 1e-4
_SLEEP_CYCLES = 10**7  # some milliseconds, which measure a device's clock well enough

_Mark = Any
"""A moment on a device's clock; only the timer that created it can read it."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Span:
    """The begin and end of one piece of work on a device.

    Attributes:
        begin, end: moments on the device's clock, which its timer can read.
        host_s: the time in which the host launched the work, in seconds; 0 on CPUs.
        ahead: whether the host launched all of the work before the device began; otherwise there may be gaps.
        waited_s: the time in which a CPU rank's thread waited for a core, in seconds.
    """

    begin: _Mark
    end: _Mark
    host_s: float = 0.0
    ahead: bool = True
    waited_s: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether the span may contain waiting for the host or for a core."""
        return not self.ahead or self.waited_s > 0


def timed(timer: DeviceTimer, work: Callable[[], _Result]) -> tuple[_Result, Span]:
    begun = timer.begin()
    result = work()
    return result, timer.end(begun)


def counted(timer: DeviceTimer, spans: Sequence[Span]) -> float:
    """Return the duration, in seconds, that counts: the smallest (CPU) or median (GPU) of undisturbed spans,
    or of all spans if every one was disturbed."""
    return timer.counting_s(timer.seconds([span for span in spans if not span.disturbed] or spans))


def _waited_s() -> float:
    """Return how long this thread has waited for a core, in seconds; 0 if the system does not report it."""
    try:
        # Opened each time: an open file stays that of one thread, also in a forked process.
        with open("/proc/thread-self/schedstat", "rb") as file:
            # Nanoseconds at work, nanoseconds of waiting, turns.
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


class WallTimer:
    """A timer of a CPU rank by the system's clock.

    Attributes:
        host_apart: whether a host launches the work of a separate device.
    """

    device = torch.device("cpu")
    host_apart = False

    def copies(self, size_bytes: int) -> int:
        """Return how many copies of a workload's tensors (``size_bytes`` each) to use in turn, so that each
        has left the cache when its turn comes."""
        return min(_MOST_COPIES, ceil(_CACHE_BYTES / max(size_bytes, 1)))

    def leave_cache(self) -> None:
        """Do nothing: visiting copies in turn already leaves the cache."""

    def begin(self, *, ahead: bool = True, first: Callable[[], object] | None = None) -> tuple[float, float]:
        """Begin a piece of work, after ``first``; pass the returned value to :meth:`end`. ``ahead`` is
        ignored, as no host launches the work of a CPU rank."""
        if first is not None:
            first()
        before_s = _waited_s()
        return time.perf_counter(), before_s

    def end(self, begun: Any) -> Span:
        end, (begin, before_s) = time.perf_counter(), begun
        return Span(begin, end, waited_s=_waited_s() - before_s)

    def seconds(self, spans: Sequence[Span]) -> list[float]:
        return [span.end - span.begin - span.waited_s for span in spans]

    def counting_s(self, seconds: Sequence[float]) -> float:
        return min(seconds)

    def release(self) -> None:
        """Do nothing: a CPU rank keeps freed memory (:mod:`tensoropt.ranks.worker`)."""

    def works(self) -> bool:
        return True


class EventTimer:
    """A timer of a GPU by events in its current stream. It zeroes a large tensor to empty the L2 cache.

    Args:
        device: for example ``cuda:0``.
        cuda: an object with ``torch.cuda``'s functions.
    """

    host_apart = True

    def __init__(self, device: str | torch.device, cuda: Any = torch.cuda):
        self.device = torch.device(device)
        self._cuda = cuda
        self._other: torch.Tensor | None = None
        self._lead_s = _LEAST_LEAD_S

    @property
    def cache_bytes(self) -> int:
        return getattr(self._cuda.get_device_properties(self.device), "L2_cache_size", 0) or _GPU_CACHE_BYTES

    def copies(self, size_bytes: int) -> int:
        """Return 1, as :meth:`leave_cache` empties a GPU's cache."""
        return 1

    def leave_cache(self) -> None:
        if self._other is None:
            self._other = torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=self.device)
        self._other.zero_()

    def begin(
        self, *, ahead: bool = True, first: Callable[[], object] | None = None
    ) -> tuple[Any, float, bool]:
        """Begin a piece of work; pass the returned value to :meth:`end`.

        Args:
            ahead: keep the device busy while the host launches the work.
            first: run before the work and not timed, such as a barrier.
        """
        # Earlier work is finished, so the queue is never full; otherwise the host would wait for the device.
        self._cuda.synchronize(self.device)
        if ahead:
            self._cuda._sleep(ceil(self._lead_s * self._cycles_per_s))
        if first is not None:
            first()
        return self._mark(), time.perf_counter(), ahead

    def end(self, begun: Any) -> Span:
        begin, started_s, led = begun
        host_s = time.perf_counter() - started_s
        end = self._mark()
        if not led:
            return Span(begin, end, host_s, ahead=False)
        # The device has not reached the first mark yet, so everything that follows is already in its queue.
        ahead = not begin.query()
        if ahead:
            # Forward and backward take turns and need separate leads: the longer one decays slowly.
            self._lead_s = max(_LEAST_LEAD_S, 2 * host_s, 0.9 * self._lead_s)
        else:
            self._lead_s = min(2 * self._lead_s, _MOST_LEAD_S)
        return Span(begin, end, host_s, ahead)

    def _mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    @cached_property
    def _cycles_per_s(self) -> float:
        self._cuda._sleep(_SLEEP_CYCLES)  # the first one loads the kernel
        begin = self._mark()
        self._cuda._sleep(_SLEEP_CYCLES)
        end = self._mark()
        [seconds] = self.seconds([Span(begin, end)])
        return _SLEEP_CYCLES / seconds

    def seconds(self, spans: Sequence[Span]) -> list[float]:
        self._cuda.synchronize(self.device)
        return [span.begin.elapsed_time(span.end) / 1e3 for span in spans]  # PyTorch gives milliseconds

    def counting_s(self, seconds: Sequence[float]) -> float:
        return statistics.median(seconds)

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # from a device that no longer answers
            self._cuda.empty_cache()

    def works(self) -> bool:
        try:
            self._cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True


DeviceTimer = WallTimer | EventTimer


def end_if_lost(timer: DeviceTimer, reason: str) -> None:
    """End this rank's process if its device no longer answers, so that the pool starts another."""
    if not timer.works():
        print(reason, file=sys.stderr, flush=True)
        # Without Python's clean-up, which might wait for the device forever.
        os._exit(_LOST_DEVICE)


def local_timer() -> DeviceTimer:
    """Return the timer of this rank's device: its GPU with nccl, otherwise its CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return timer_of(f"cuda:{torch.cuda.current_device()}")
    return timer_of("cpu")


@cache
def timer_of(device: str) -> DeviceTimer:
    return WallTimer() if device == "cpu" else EventTimer(device)
