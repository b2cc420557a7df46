"""Functions that run on each rank to time collectives and messages when links are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tensoropt.profiling.timers import local_timer
from tensoropt.ranks.worker import common_clock

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_WARM_UPS = 2  # one for sizes with few repeats, because these are long
_LAPS, _FEWEST_IN_A_LAP = 5, 10
"""The laps over which the repeats of a size are spread, and the fewest repeats per lap."""


class SizeStamps(NamedTuple):
    """The times of all repeats of one message size on one rank, in seconds.

    Attributes:
        starts, ends: when each repeat that found the device idle began and ended, on the ranks' common clock.
        in_stream: the durations of repeats queued behind other work on the device; NaN if the device finished
            the other work before the host had queued the repeat. Empty on CPUs, which have no queue.
    """

    starts: list[float]
    ends: list[float]
    in_stream: list[float]


_Stamps = list[SizeStamps]


def time_collective(
    rank: int,
    world_size: int,
    kind: str,
    groups: Sequence[Sequence[int]],
    plan: Sequence[tuple[int, int]],
) -> _Stamps:
    """Time a collective in this rank's group, while all other groups run it, too; return the times by size.

    Args:
        groups: a partition of all ranks.
        plan: ``(bytes, repeats)`` per size; bytes of the tensor, for all-gather of the output of one rank,
            for reduce-scatter and all-to-all of its input. The sizes take turns in several rounds of repeats.
    """
    clock = common_clock()
    handles = [dist.new_group(list(group)) for group in groups]  # every rank creates every group
    mine = next(index for index, group in enumerate(groups) if rank in group)
    try:
        group, ranks, first = handles[mine], len(groups[mine]), groups[mine][0]
        meet = _collective_call("all_reduce", group, ranks, first, 4 * ranks)
        stamps: _Stamps = [SizeStamps([], [], []) for _ in plan]
        for lap in range(_LAPS):
            for (size, repeats), (starts, ends, in_stream) in zip(plan, stamps, strict=True):
                laps = min(_LAPS, max(1, repeats // _FEWEST_IN_A_LAP))  # long ones need no more
                # The repeats of a size are spread evenly over its laps: lap, lap + laps, ...
                if turns := len(range(lap, repeats, laps)) if lap < laps else 0:
                    action = _collective_call(kind, group, ranks, first, size)
                    begun, ended = _repeat(action, turns, clock)
                    starts += begun
                    ends += ended
                    in_stream += _in_stream(action, turns, meet)
        return stamps
    finally:
        dist.destroy_process_group(handles[mine])


def time_pair(rank: int, world_size: int, pair: Sequence[int], plan: Sequence[tuple[int, int]]) -> _Stamps:
    """Time a message from the first rank of the pair to the second and back, while the other ranks wait;
    return the times by size. ``plan`` has ``(bytes, repeats)`` per size."""
    clock, stamps, device = common_clock(), _Stamps(), local_timer().device

    def there_and_back(message: torch.Tensor) -> None:
        if rank == pair[0]:
            dist.send(message, pair[1])
            dist.recv(message, pair[1])
        elif rank == pair[1]:
            dist.recv(message, pair[0])
            dist.send(message, pair[0])

    meet = partial(there_and_back, torch.zeros(1, device=device))
    for size, repeats in plan:
        action = partial(there_and_back, torch.zeros(max(1, size // 4), device=device))
        stamps.append(SizeStamps(*_repeat(action, repeats, clock), _in_stream(action, repeats, meet)))
    return stamps


def _collective_call(kind: str, group: Any, ranks: int, first: int, size: int) -> Callable[[], object]:
    """Return a function that runs a collective of ``size`` bytes; ``first`` is the source of a broadcast."""
    part, device = max(1, size // 4 // ranks), local_timer().device  # float32 elements of one rank's share
    whole, share = (torch.zeros(count, device=device) for count in (part * ranks, part))
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, share, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(share, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
    }
    return calls[kind]


def _repeat(
    action: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Run an action several times, each after a barrier; return its starts and ends on the common clock."""
    synchronise: Callable[[], None] = torch.cuda.synchronize if local_timer().host_apart else lambda: None
    for _ in range(min(_WARM_UPS, repeats // 3)):
        action()
    starts, ends = [], []
    for _ in range(repeats):
        # Before the barrier, so that a GPU's queue is empty when the clock is read.
        synchronise()
        dist.barrier()
        starts.append(clock())
        action()
        synchronise()
        ends.append(clock())
    return starts, ends


def _in_stream(action: Callable[[], object], repeats: int, meet: Callable[[], object]) -> list[float]:
    """Return the seconds that each repeat takes when queued behind other work of the device; empty on CPUs,
    which have no queue.

    Args:
        meet: an action that synchronises the devices of all ranks, so that no timed rank waits for another.
    """
    timer = local_timer()
    if not timer.host_apart:
        return []
    spans = []
    for _ in range(repeats + _WARM_UPS):  # from which the timer learns the lead that the host needs
        begun = timer.begin(first=meet)
        action()
        spans.append(timer.end(begun))
    spans = spans[_WARM_UPS:]
    return [s if span.ahead else math.nan for s, span in zip(timer.seconds(spans), spans, strict=True)]
