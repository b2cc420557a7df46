"""What runs on the ranks when links are measured: collectives and messages between stamps of the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_WARM_UPS = 2  # one where repeats are few, because they are long

Stamps = list[tuple[list[float], list[float]]]  # per size: starts and ends of the repeats
_ARRIVAL_BYTES = 64 * 1024
_WALKED_BYTES = 4 * 2**20


def time_collective(
    rank: int,
    world_size: int,
    kind: str,
    groups: Sequence[Sequence[int]],
    functional: bool,
    plan: Sequence[tuple[int, int]],
) -> Stamps:
    """Run one collective in this rank's group, all groups at the same time.

    Args:
        functional: through the functional collectives, as ``DTensor.redistribute`` issues them: they
            make a new output each time and cost a few hundred microseconds more on gloo.
        groups: a partition of all ranks.
        plan: ``(bytes, repeats)`` per size; the bytes count as in :mod:`tensoropt.costs.links`.
    """
    import torch.distributed as dist

    handles = [dist.new_group(list(group)) for group in groups]  # every rank makes every group
    mine = next(index for index, group in enumerate(groups) if rank in group)
    try:
        stamps: Stamps = []
        for size, repeats in plan:
            action = _collective(kind, handles[mine], len(groups[mine]), groups[mine][0], size, functional)
            stamps.append(_repeat(action, repeats))
        return stamps
    finally:
        dist.destroy_process_group(handles[mine])


def time_arrivals(
    rank: int, world_size: int, groups: Sequence[Sequence[int]], plan: Sequence[tuple[int, int]]
) -> list[tuple[list[float], list[float], list[float]]]:
    """An all-reduce to which ranks come from work that each does at its own pace, as in a step.

    Args:
        plan: ``(units of work, repeats)``; none: all come from a barrier.

    Returns:
        per entry of the plan when work began, when it ended and the collective began, when that ended.
    """
    import torch
    import torch.distributed as dist

    handles = [dist.new_group(list(group)) for group in groups]
    mine = next(index for index, group in enumerate(groups) if rank in group)
    action = _collective(
        "all_reduce", handles[mine], len(groups[mine]), groups[mine][0], _ARRIVAL_BYTES, False
    )
    data, rows = torch.zeros(_WALKED_BYTES // 4), torch.randn(64, 128)
    layers = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
    try:
        found = []
        for units, repeats in plan:
            begins: list[float] = []

            def work(units: int = units, begins: list[float] = begins) -> None:
                begins.append(time.perf_counter())
                for _ in range(units):
                    data.add_(1.0)
                    layers(rows).sum().backward()

            starts, ends = _repeat(action, repeats, work)
            found.append((begins[-repeats:], starts, ends))
        return found
    finally:
        dist.destroy_process_group(handles[mine])


def time_pair(rank: int, world_size: int, pair: Sequence[int], plan: Sequence[tuple[int, int]]) -> Stamps:
    """Send a message from the first rank of the pair to the second and back; the others wait."""
    import torch
    import torch.distributed as dist

    stamps: Stamps = []
    for size, repeats in plan:
        message = torch.zeros(max(1, size // 4), device=_device())

        def there_and_back(message: torch.Tensor = message) -> None:
            if rank == pair[0]:
                dist.send(message, pair[1])
                dist.recv(message, pair[1])
            elif rank == pair[1]:
                dist.recv(message, pair[0])
                dist.send(message, pair[0])

        stamps.append(_repeat(there_and_back, repeats))
    return stamps


def _collective(
    kind: str, group: Any, ranks: int, first: int, size: int, functional: bool
) -> Callable[[], object]:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functions

    part = max(1, size // 4 // ranks)  # float32 elements of one rank's share
    whole = torch.zeros(part * ranks, device=_device())
    share = torch.zeros(part, device=_device())
    other = torch.empty_like(whole)
    wait = functions.wait_tensor
    in_place: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, share, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(share, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
    }
    as_functions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: wait(functions.all_reduce(whole, "sum", group)),
        "all_gather": lambda: wait(functions.all_gather_single(share, 0, group)),
        "reduce_scatter": lambda: wait(functions.reduce_scatter_single(whole, "sum", 0, group)),
        "all_to_all": lambda: wait(functions.all_to_all_single(whole, None, None, group)),
        # Its source is a rank of the group, that of dist.broadcast one of the world.
        "broadcast": lambda: wait(functions.broadcast(whole, 0, group)),
    }
    return (as_functions if functional else in_place)[kind]


def _repeat(
    action: Callable[[], object], repeats: int, work: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Starts and ends of an action, to which all ranks come from a barrier and then ``work``."""
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
        synchronise()
        dist.barrier()
        work()
        starts.append(time.perf_counter())
        action()
        synchronise()
        ends.append(time.perf_counter())
    return starts, ends


def _device() -> str:
    import torch
    import torch.distributed as dist

    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"
