"""Operations on finished frontiers: merge, knee, hypervolume, distance.

Every function accepts any object with ``memory`` and ``time`` arrays: a
:class:`~tensoropt.frontier.Frontier`, the result of a search, or a planner's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tensoropt.frontier.algebra import Frontier, reduce
from tensoropt.types import Floats


class Points(Protocol):
    """Any object that has the costs of n points; ``memory`` and ``time`` are (n,) arrays."""

    @property
    def memory(self) -> Floats: ...

    @property
    def time(self) -> Floats: ...


def merge(frontiers: Sequence[Points]) -> Frontier:
    """Return the frontier of several frontiers (meshes, micro-batch counts, planners) with each point's
    origin.

    ``origin[p] = (which, index)``: point ``p`` is point ``index`` of ``frontiers[which]``. Of equal points
    the one from the earliest frontier is kept. The inputs need not be reduced.
    """
    if not frontiers:
        return reduce(np.empty(0), np.empty(0))
    sizes = [len(f.memory) for f in frontiers]
    which = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in sizes])
    return reduce(
        np.concatenate([np.asarray(f.memory, dtype=np.float64) for f in frontiers]),
        np.concatenate([np.asarray(f.time, dtype=np.float64) for f in frontiers]),
        np.stack([which, index], axis=1),
    )


def knee(points: Points) -> int:
    """Return the index of the knee: the point farthest below the chord between the ends, in logarithms of
    both costs.

    Logarithms, because people trade percentages (factors), not bytes for seconds. Of equal points the first;
    0 for fewer than three points. Raises ``ValueError`` if there are no points.
    """
    memory, time = np.asarray(points.memory, np.float64), np.asarray(points.time, np.float64)
    if len(memory) == 0:
        raise ValueError("an empty frontier has no knee")
    if len(memory) < 3:
        return 0
    x, y = _unit_log(memory), _unit_log(time)
    # The ends are (0, 1) and (1, 0): up to a factor this is the distance below the chord between them.
    return int(np.argmax(1.0 - x - y))


def _unit_log(values: Floats) -> Floats:
    positive = values[values > 0]
    floor = positive.min() if len(positive) else 1.0
    # A cost of 0 has no logarithm; a thousandth of the smallest other cost replaces it. An assumption: the
    # smaller this replacement, the more the curve is stretched towards that end.
    logs = np.log(np.maximum(values, floor * 1e-3))
    span = logs.max() - logs.min()
    return (logs - logs.min()) / span if span > 0 else np.zeros_like(logs)


def hypervolume(points: Points, reference: tuple[float, float]) -> float:
    """The area between the frontier and ``reference`` = (memory, time), in byte-seconds; larger is better.

    Computed by moocore (Fonseca, Paquete, López-Ibáñez 2006).
    """
    import moocore

    data = _matrix(points)
    return float(moocore.hypervolume(data, ref=np.asarray(reference, np.float64))) if len(data) else 0.0


def distance(points: Points, reference: Points) -> float:
    """How far ``points`` fall short of ``reference``: the multiplicative epsilon indicator minus one.

    0.01 means that for every point of ``reference`` some point of ``points`` is at most 1 % worse in both
    costs (Zitzler et al. 2003; moocore). Zero costs are compared only with each other: a zero that is not
    reached gives ``inf``. Raises ``ValueError`` for empty frontiers.
    """
    import moocore

    ours, theirs = _matrix(points), _matrix(reference)
    if not len(ours) or not len(theirs):
        raise ValueError("the distance of an empty frontier is undefined")
    # moocore refuses values that are not positive, because the indicator divides by them.
    if (ours > 0).all() and (theirs > 0).all():
        return float(moocore.epsilon_mult(ours, ref=theirs)) - 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        # 0 over 0 is 1, because nothing is lost; anything else over 0 stays inf.
        ratio = np.where(ours[:, None] == theirs[None], 1.0, ours[:, None] / theirs[None])
    return float(ratio.max(axis=2).min(axis=0).max()) - 1.0


def _matrix(points: Points) -> Floats:
    return np.stack([np.asarray(points.memory, np.float64), np.asarray(points.time, np.float64)], axis=1)
