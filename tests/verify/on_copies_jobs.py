"""What ranks run to try collectives of which gloo's threads keep nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tensoropt.engine.gathering import gather, scatter, wait
from tensoropt.verify.recorder import MemoryTracker

PIECE = 4096
TIMES = 200


def _all_reduce(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    work = dist.all_reduce(own, async_op=True)
    work.wait()
    work.wait()
    return [own]


def _all_gather(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    found = own.new_empty(world * own.numel())
    dist.all_gather_into_tensor(found, own)
    return [found]


def _all_gather_list(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(found, own)
    return found


def _reduce_scatter(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    found = own.new_empty(own.numel() // world)
    dist.reduce_scatter_tensor(found, own)
    return [found, own]


def _all_to_all(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    found = torch.empty_like(own)
    dist.all_to_all_single(found, own)
    return [found]


def _broadcast(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    dist.broadcast(own, 1)
    return [own]


def _coalesced(own: torch.Tensor, world: int) -> list[torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    gathered = [wait(value) for value in gather([own, own * 2], group)]
    return [*gathered, *(wait(value) for value in scatter([own, own * 3], group))]


_RUN: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_list": _all_gather_list,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "coalesced": _coalesced,
}
COLLECTIVES = tuple(_RUN)
GATHERED_BYTES = 3 * PIECE * 4
"""One rank's piece and those of two that were gathered."""


def results(rank: int, world: int, name: str) -> tuple[list[Any], list[Any]]:
    """What a collective gives as it is, and while memory is tracked."""
    own = torch.arange(4 * world, dtype=torch.float32) + 100 * rank
    plain = _RUN[name](own.clone(), world)
    with MemoryTracker():
        tracked = _RUN[name](own.clone(), world)
    return [value.tolist() for value in plain], [value.tolist() for value in tracked]


def freed_at_once(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Tracked peaks of gathering a piece again and again, and what is alive after each."""
    peaks, after = [], []
    for _ in range(TIMES):
        with MemoryTracker() as tracker:
            for _ in range(3):
                own = torch.ones(PIECE)
                found = torch.empty(world * PIECE)
                dist.all_gather_into_tensor(found, own)
                del own, found
                after.append(tracker.now_bytes)
        peaks.append(tracker.peak_bytes)
    return peaks, after
