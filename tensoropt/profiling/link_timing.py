"""Functions that run on ranks when links are measured: collectives and messages between clock stamps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensoropt.profiling.timers import local_timer
from tensoropt.ranks.worker import common_clock

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_WARM_UPS = 2  # one for sizes with few repeats, because these are long
_LAPS, _FEWEST_IN_A_LAP = 5, 10
"""The laps over which the repeats of a size are spread, and the fewest repeats per lap."""


class SizeStamps(NamedTuple):
    """The repeats of one size on one rank, in seconds.

    Attributes:
        starts, ends: from idle, on the common clock.
        in_stream: queued behind other work on the device; NaN if the host was not ahead, None on CPUs.
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
    """Run one collective in this rank's group, all groups at once; sizes take turns in laps.

    Args:
        groups: a partition of all ranks.
        plan: ``(bytes, repeats)`` per size, as in :mod:`tensoropt.profiling.links`.
    """
    import torch.distributed as dist

    clock = common_clock()
    handles = [dist.new_group(list(group)) for group in groups]  # every rank creates every group
    mine = next(index for index, group in enumerate(groups) if rank in group)
    try:
        group, ranks, first = handles[mine], len(groups[mine]), groups[mine][0]
        meet = collective_call("all_reduce", group, ranks, first, 4 * ranks)
        stamps: _Stamps = [SizeStamps([], [], []) for _ in plan]
        for lap in range(_LAPS):
            for (size, repeats), (starts, ends, in_stream) in zip(plan, stamps, strict=True):
                laps = min(_LAPS, max(1, repeats // _FEWEST_IN_A_LAP))  # long ones need no more
                # The repeats of a size are spread evenly over its laps: lap, lap + laps, ...
                if turns := len(range(lap, repeats, laps)) if lap < laps else 0:
                    action = collective_call(kind, group, ranks, first, size)
                    begun, ended = _repeat(action, turns, clock)
                    starts += begun
                    ends += ended
                    in_stream += _in_stream(action, turns, meet)
        return stamps
    finally:
        dist.destroy_process_group(handles[mine])


def time_pair(rank: int, world_size: int, pair: Sequence[int], plan: Sequence[tuple[int, int]]) -> _Stamps:
    """Send a message from the first rank of the pair to the second and back; the others wait."""
    import torch
    import torch.distributed as dist

    clock, stamps = common_clock(), _Stamps()
    small = torch.zeros(1, device=_device())
    for size, repeats in plan:
        message = torch.zeros(max(1, size // 4), device=_device())

        def there_and_back(message: torch.Tensor = message) -> None:
            if rank == pair[0]:
                dist.send(message, pair[1])
                dist.recv(message, pair[1])
            elif rank == pair[1]:
                dist.recv(message, pair[0])
                dist.send(message, pair[0])

        def meet(there_and_back: Callable[..., None] = there_and_back) -> None:
            there_and_back(small)

        stamps.append(
            SizeStamps(*_repeat(there_and_back, repeats, clock), _in_stream(there_and_back, repeats, meet))
        )
    return stamps


def collective_call(kind: str, group: Any, ranks: int, first: int, size: int) -> Callable[[], object]:
    """Return a collective of ``size`` bytes among ``ranks``, with the source ``first`` if any."""
    import torch
    import torch.distributed as dist

    part = max(1, size // 4 // ranks)  # float32 elements of one rank's share
    whole = torch.zeros(part * ranks, device=_device())
    share = torch.zeros(part, device=_device())
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
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and dist.get_backend() == "nccl"

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize()

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
    """Return the seconds of an action queued behind other work of the device, per repeat; none on CPUs.

    Args:
        meet: synchronises all ranks' devices, so that none waits for another in the action.
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


def _device() -> str:
    import torch
    import torch.distributed as dist

    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"
