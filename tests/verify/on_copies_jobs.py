"""What ranks run to try collectives of which gloo's threads keep nothing."""

import torch
import torch.distributed as dist

from tensoropt.engine.gathering import gather, scatter, wait
from tensoropt.verify.recorder import MemoryTracker

PIECE = 4096
TIMES = 200


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_list", "reduce_scatter", "all_to_all", "broadcast", "coalesced",
)  # fmt: skip


def _run(name: str, own: torch.Tensor, world: int) -> list[torch.Tensor]:
    """What a collective gives, and what becomes of what it was given."""
    group = dist.group.WORLD
    assert group is not None
    found = [torch.empty_like(own) for _ in range(world)]
    if name == "all_reduce":
        work = dist.all_reduce(own, async_op=True)
        work.wait()
        work.wait()
    elif name == "all_gather":
        found = [own.new_empty(world * own.numel())]
        dist.all_gather_into_tensor(found[0], own)
    elif name == "all_gather_list":
        dist.all_gather(found, own)
    elif name == "reduce_scatter":
        found = [own.new_empty(own.numel() // world)]
        dist.reduce_scatter_tensor(found[0], own)
    elif name == "all_to_all":
        found = found[:1]
        dist.all_to_all_single(found[0], own)
    elif name == "broadcast":
        dist.broadcast(own, 1)
    else:
        gathered = [wait(value) for value in gather([own, own * 2], group)]
        return [*gathered, *(wait(value) for value in scatter([own, own * 3], group))]
    return [own] if name in ("all_reduce", "broadcast") else [*found, own]


GATHERED_BYTES = 3 * PIECE * 4
"""One rank's piece and those of two that were gathered."""


def results(rank, world, name):
    """What a collective gives as it is, and while memory is tracked."""
    own = torch.arange(4 * world, dtype=torch.float32) + 100 * rank
    plain = _run(name, own.clone(), world)
    with MemoryTracker():
        tracked = _run(name, own.clone(), world)
    return [value.tolist() for value in plain], [value.tolist() for value in tracked]


def freed_at_once(rank, world):
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
