"""The machine's pace: a reference work of some milliseconds, timed beside whatever is measured or run.

A shared machine is slower in some minutes than in others. What was timed in a slow one is scaled to the usual
pace, and results say at which share of it the machine ran. CPU ranks only: a GPU is seldom shared.

The reference work is what a step is made of, products and collectives between them. Beside the steps of four
models on two ranks, 40 s of each, in means of six steps, its seconds and theirs vary alike: scaled by it,
44 % of the deviation is left. Products alone leave 78 % of it, as they vary more than a step; with memory
that is moved, 71 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tensoropt.cluster.local import BUSY, cores_in_use
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.pool import RankPool

_KIND, _KEY = "calibration", "reference"
PACE_S = "reference_s"
"""The field of a record of measured seconds that has those of the reference work meanwhile. Both names are
new ones when the reference work changes."""
_REPEATS = 9
_WIDTH, _ROWS, _LAYERS = 256, 128, 8
_SUMS, _SUMMED = 5, 1 << 16
"""The all-reduces of the reference work, and the elements of each: they take half as long as its products."""
_KEPT = 31
"""Samples of an idle machine whose median is the usual pace."""
SLOW = 0.85
"""The share of the usual pace below which results say so: an assumption, beyond what idle minutes differ
by."""


@cache
def _operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(_WIDTH, _WIDTH, generator=generator) for _ in range(_LAYERS)]
    return torch.randn(_ROWS, _WIDTH, generator=generator), *weights, torch.zeros(_SUMMED)


@torch.no_grad()
def _work_s(world_size: int) -> float:
    x, *weights, summed = _operands()
    since = time.perf_counter()
    for weight in weights:
        x = torch.tanh(x @ weight)
    for _ in range(_SUMS if world_size > 1 else 0):
        dist.all_reduce(summed)
    return time.perf_counter() - since


def pace_s(rank: int, world_size: int) -> float:
    """Return the seconds of the reference work on this rank while all ranks do it at once: the median of a
    few repeats. Runs in the pool."""
    seconds = []
    for _ in range(_REPEATS):
        if world_size > 1:
            dist.barrier()
        seconds.append(_work_s(world_size))
    return statistics.median(seconds)


def follows(pool: Any) -> bool:
    """Return whether a pool's ranks have a pace: a GPU's is its own, and stand-ins of a pool have none."""
    return isinstance(pool, RankPool) and pool.backend == "gloo" and not pool.share_gpu


def paced(pool: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the record that ``measure`` makes, with :data:`PACE_S` if the ranks have a pace: the mean of
    before and after."""
    if not follows(pool):
        return measure()
    before_s = max(pool.run(pace_s))
    record = measure()
    return record | {PACE_S: (before_s + max(pool.run(pace_s))) / 2}


class Pace:
    """The pace of the ranks of a pool, compared with what is usual for them.

    Args:
        prefix: the hardware and the way of measuring; part of the store's key.
    """

    def __init__(self, pool: RankPool, store: ProfileStore, prefix: str):
        self.pool, self.store, self._key = pool, store, f"{prefix}/{_KEY}"

    def now_s(self, cores_busy: float | None = None) -> float:
        """Return the seconds of the reference work on the slowest rank now; those of an idle machine count
        for what is usual.

        Args:
            cores_busy: the cores that other programs have in use; looked at by default.
        """
        idle = (cores_in_use() if cores_busy is None else cores_busy) < BUSY
        seconds = max(self.pool.run(pace_s))
        if idle:
            record = self.store.get(self._key, kind=_KIND) or {"seconds": []}
            kept = [*record["seconds"], seconds][-_KEPT:]
            self.store.put(self._key, {"seconds": kept}, kind=_KIND)
        return seconds


_in_force: WeakKeyDictionary[ProfileStore, dict[str, float]] = WeakKeyDictionary()
"""The usual seconds by prefix that prices from an opened store are scaled to."""


def usual_pace_s(store: ProfileStore, prefix: str) -> float | None:
    """Return the usual seconds of the reference work on the ranks of ``prefix``; None if not known.

    They are those that were known when the opened store was first asked for them: what is scaled to different
    values does not go together, and every further look at the pace changes the median a little.
    """
    known = _in_force.setdefault(store, {})
    if prefix not in known:
        record = store.get(f"{prefix}/{_KEY}", kind=_KIND)
        if not record:
            return None
        known[prefix] = statistics.median(record["seconds"])
    return known[prefix]


def pace_share(usual_s: float | None, seconds: float | None) -> float:
    """Return at which share of its usual pace the machine ran; 1 if that is not known.

    Args:
        usual_s, seconds: of the reference work, usually and around what was timed.
    """
    return 1.0 if usual_s is None or seconds is None else usual_s / seconds


def pace_words(share: float) -> str:
    """Return what to say of a machine that ran at a share of its pace; empty if it was about the usual."""
    return "" if share >= SLOW else f"the machine ran at {share:.2g} of its pace while this was measured"
