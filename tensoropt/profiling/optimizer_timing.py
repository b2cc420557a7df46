"""The time of an optimizer's step per element of its parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import counted, local_timer, timed
from tensoropt.ranks.pool import RankPool


def time_optimizer(rank: int, world_size: int, name: str, elements: int) -> float:
    """Return the seconds that a step over ``elements`` float32 elements takes on this rank's device."""
    timer = local_timer()
    # Several parameters, because multi-tensor steps work on lists; eight is an assumption.
    parameters = [torch.randn(elements // 8, device=timer.device).requires_grad_() for _ in range(8)]
    flat = torch.randn(elements // 8 * 8, device=timer.device)
    for parameter, piece in zip(parameters, flat.split(elements // 8), strict=True):
        # Gradients are slices of one flat tensor, as in the executor's buckets.
        parameter.grad = piece
    optimizer = make_optimizer(name, parameters)
    # The first step creates the optimizer's state, which later steps reuse.
    optimizer.step()

    def step() -> None:
        flat.zero_()
        optimizer.step()

    warm_ups, spans = 2 * timer.host_apart, []
    for _ in range(warm_ups + 5):
        if world_size > 1:
            dist.barrier()
        spans.append(timed(timer, step)[1])
    return counted(timer, spans[warm_ups:])


_OPTIMIZER_SIZES = (1 << 18, 1 << 22)
"""The numbers of elements of two timed steps; their difference excludes the overhead per parameter."""


def measure_optimizer(pool: RankPool, store: ProfileStore, prefix: str, name: str) -> float:
    """Return the seconds per element of an optimizer's step: the slope between steps of two sizes."""
    key = f"{prefix}/optimizer-{name}"
    record = store.get(key)
    if record is None:
        small, large = (max(pool.run(time_optimizer, name, n)) for n in _OPTIMIZER_SIZES)
        slope = max(large - small, 0.0) / (_OPTIMIZER_SIZES[1] - _OPTIMIZER_SIZES[0])
        record = {"seconds_per_element": slope}
        store.put(key, record)
    return float(record["seconds_per_element"])
