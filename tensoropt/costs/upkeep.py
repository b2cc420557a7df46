"""Upkeep: what a step spends beside operators and collectives.

Copies around collectives, the way of each gradient into its bucket, and the fixed cost of issuing an
edge: small per item, but a plan with many edges and micro-batches has hundreds of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.cluster import DeviceKind
from tensoropt.costs.pool import RankPool
from tensoropt.costs.stopwatch import stopwatch_here
from tensoropt.costs.store import ProfileStore

_ELEMENTS = 1 << 22
_CALLS = 200
_LAUNCH_S = 2e-5
"""Issuing one edge on a GPU: Python, autograd and a launch; data sheets do not say."""


@dataclass(frozen=True)
class Upkeep:
    """Seconds per byte of a local copy and of an in-place addition, and per issued edge direction."""

    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    call_s: float = 0.0

    def arrival_s(self, gradient_bytes: float, micro_batches: int = 1) -> float:
        """Seconds per micro-batch until a gradient is in its bucket: the first one's is copied there, those
        of the others are added."""
        added = (micro_batches - 1) * self.add_s_per_byte
        return gradient_bytes * (self.copy_s_per_byte + added) / micro_batches


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def time_upkeep(rank: int, world_size: int) -> dict[str, float]:
    """Upkeep on this rank, all ranks at once (runs in the pool)."""
    watch = stopwatch_here()
    x, y = (torch.randn(_ELEMENTS, device=watch.device) for _ in range(2))
    spans, calls = [], []
    for _ in range(7):
        if world_size > 1:
            dist.barrier()
        start = watch.mark()
        x.clone()
        middle = watch.mark()
        x.add_(y)
        spans += [(start, middle), (middle, watch.mark())]
    seconds = watch.seconds(spans)
    copies, additions = seconds[::2], seconds[1::2]
    small = torch.randn(64, requires_grad=True, device=watch.device)
    for _ in range(5):  # issuing takes the processor's time on any device
        value, start = small, time.perf_counter()
        for _ in range(_CALLS):
            value = _Pass.apply(value)
        value.sum().backward()
        calls.append((time.perf_counter() - start) / (2 * _CALLS))
    size = x.numel() * x.element_size()
    return asdict(
        Upkeep(
            statistics.median(copies) / size, statistics.median(additions) / size, statistics.median(calls)
        )
    )


def measure_upkeep(pool: RankPool, store: ProfileStore, prefix: str) -> Upkeep:
    """Upkeep of the slowest rank, from the store where it is known."""
    known = known_upkeep(store, prefix)
    if known is not None:
        return known
    ranks = pool.run(time_upkeep)
    record = {name: max(r[name] for r in ranks) for name in ranks[0]}
    store.put(f"{prefix}/upkeep", record)
    return Upkeep(**record)


def known_upkeep(store: ProfileStore, prefix: str) -> Upkeep | None:
    """What was measured before."""
    record = store.get(f"{prefix}/upkeep")
    return Upkeep(**record) if record is not None else None


def data_sheet_upkeep(device: DeviceKind) -> Upkeep:
    """Upkeep from memory bandwidth: a copy reads and writes, an addition reads twice and writes."""
    return Upkeep(2 / device.memory_bandwidth, 3 / device.memory_bandwidth, _LAUNCH_S)


def slowest_upkeep(kinds: Iterable[Upkeep]) -> Upkeep:
    """Of ranks that wait for each other."""
    rows = zip(*(astuple(kind) for kind in kinds), strict=True)
    return Upkeep(*(max(row) for row in rows))
