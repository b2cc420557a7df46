"""The peak FLOP/s of CPU ranks, measured by matrix products while all ranks compute."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import WallTimer, counted, timed
from tensoropt.ranks.pool import RankPool

_KEY = "peak"
TIMED = ("float64", "float32", "bfloat16")
"""The dtypes whose products have kernels of their own."""
_WIDTHS, _EACH_S = (512, 1024), 0.15
"""The sides of square products, and seconds of repeating each; assumptions: smaller ones are cache-bound."""


@torch.no_grad()
def _most_flops(rank: int, world_size: int, dtype: str) -> float:
    """Return the most FLOP/s that this rank reaches in matrix products of a dtype; runs in the pool."""
    timer, best = WallTimer(), 0.0
    for width in _WIDTHS:
        a, b = (torch.randn(width, width).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.mm(a, b)
        if world_size > 1:
            dist.barrier()
        until, product = time.perf_counter() + _EACH_S, partial(torch.mm, a, b, out=out)
        spans = [timed(timer, product)[1]]
        while time.perf_counter() < until:
            spans.append(timed(timer, product)[1])
        best = max(best, 2.0 * width**3 / counted(timer, spans))
    return best


def known_peaks(store: ProfileStore, prefix: str) -> dict[str, float]:
    """Return the stored peak FLOP/s of a rank by dtype."""
    return dict(store.get(f"{prefix}/{_KEY}") or {})


def measure_peaks(
    pool: RankPool, store: ProfileStore, prefix: str, dtypes: Iterable[str]
) -> dict[str, float]:
    """Measure the peak FLOP/s of a rank for some dtypes; return the best ever measured, by dtype."""
    known = known_peaks(store, prefix)
    for dtype in dtypes:
        known[dtype] = max(known.get(dtype, 0.0), *pool.run(_most_flops, dtype))
    store.put(f"{prefix}/{_KEY}", known)
    return known
