"""The time that work takes on a device: the one place where checks read a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tensoropt.profiling.timers import timed, timer_of
from tensoropt.selftest.outcome import CheckContext, Outcome

_LOOK_S = 0.5
_OWN_CORE = 0.9
"""The least share of its core that a process gets if nobody else is busy; an assumption."""


def device_seconds(work: Callable[[], object], device: torch.device, *, ahead: bool = False) -> float:
    """Return the seconds from the beginning of ``work`` on a device to its end.

    Args:
        ahead: whether the host issues all of it first, so that the device never waits for the host;
            otherwise, as in a step, it may wait.
    """
    timer = timer_of(str(device))
    _, span = timed(timer, work, ahead=ahead)
    return timer.seconds([span])[0]


def in_turns(works: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[list[float]]:
    """Return the seconds of each work in each round, run one after another so that all meet the same
    machine."""
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(rounds):
        # Forwards and then backwards, as the first one finds what the last round left behind.
        order = range(len(works)) if number % 2 == 0 else reversed(range(len(works)))
        for index in order:
            seconds[index].append(device_seconds(works[index], device))
    return seconds


def over(of: Sequence[float], to: Sequence[float]) -> float:
    """Return by how much the fastest round of one is slower than that of the other, relative: anything else
    on the machine only makes rounds slower."""
    return min(of) / min(to) - 1


def share_of_core() -> float:
    """Return the share of a core that this process gets while it has something to do."""
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + _LOOK_S:
        pass
    return (time.process_time() - used) / (time.perf_counter() - began)


def unless_busy(check: Callable[[CheckContext], Outcome], context: CheckContext) -> Outcome:
    """Return the outcome of a check of times; on CPU ranks a failure says nothing if others use the cores as
    well, and then counts as skipped, with its figures."""
    before = share_of_core()
    outcome = check(context)
    share = min(before, share_of_core())
    if outcome.state != "failed" or not outcome.figures or context.on_gpu or share >= _OWN_CORE:
        return outcome
    reason = (
        f"times say nothing, as others use this machine's cores: a busy process got {share:.0%} of one "
        f"({outcome.reason})"
    )
    return replace(outcome, state="skipped", reason=reason)
