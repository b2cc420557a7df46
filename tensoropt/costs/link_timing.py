"""What runs on the ranks when links are measured: collectives and messages between stamps of the clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_WARM_UPS = 2  # one where repeats are few, because they are long

Stamps = list[tuple[list[float], list[float]]]  # per size: starts and ends of the repeats
_WIDTH, _LAYERS = 64, 96  # 6 MiB of parameters


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


def time_transitions(
    rank: int,
    world_size: int,
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
    plan: Sequence[tuple[int, Sequence[int]]],
) -> list[list[tuple[list[float], list[float], list[float]]]]:
    """Work twice and an all-reduce by turns, each rank at its own pace, as in a step.

    Work is forward and backward of small layers, always other ones, so that parameters come from memory and
    several kernels take turns.

    Args:
        sizes: bytes of the all-reduce.
        plan: ``(layers, repeats per size)``; no layers: one all-reduce follows the other.

    Returns:
        per entry of the plan and per size when the first work ended, when the second ended and the all-reduce
        began, and when that ended.
    """
    import torch
    import torch.distributed as dist

    handles = [dist.new_group(list(group)) for group in groups]
    mine = next(index for index, group in enumerate(groups) if rank in group)
    layers = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(_WIDTH),
            torch.nn.Linear(_WIDTH, 2 * _WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(2 * _WIDTH, _WIDTH),
            torch.nn.Softmax(-1),
        )
        for _ in range(_LAYERS)
    ]
    inputs, turns = torch.randn(32, _WIDTH), itertools.cycle(layers)

    def work(count: int) -> None:
        hidden = inputs
        for layer in itertools.islice(turns, count):
            hidden = layer(hidden)
        if count:
            hidden.sum().backward()

    try:
        found = []
        for count, repeats in plan:
            row = []
            for size, times in zip(sizes, repeats, strict=True):
                action = _collective(
                    "all_reduce", handles[mine], len(groups[mine]), groups[mine][0], size, False
                )
                dist.barrier()
                middles, starts, ends = [], [], []
                for _ in range(times):
                    work(count)
                    middles.append(time.perf_counter())
                    work(count)
                    starts.append(time.perf_counter())
                    action()
                    ends.append(time.perf_counter())
                row.append((middles, starts, ends))
            found.append(row)
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


def _repeat(action: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """Starts and ends of an action, to which all ranks come from a barrier."""
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
        starts.append(time.perf_counter())
        action()
        synchronise()
        ends.append(time.perf_counter())
    return starts, ends


def _device() -> str:
    import torch
    import torch.distributed as dist

    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"
