"""Lower bounds on the time of any strategy within a memory budget, and staircases that prune a search.

One kind of bound are the lines of the frontier's lower convex hull (:mod:`tensoropt.search.hull`). Another is
a staircase (a step function of the memory budget), once a search has shown that no strategy lies below it.

A search pass (one computation of all tables) drops partial strategies that cannot come below a given
staircase. If the known strategies' staircase is far above their convex hull, too many partial strategies
remain. So the first passes use a *target*, a staircase close above the hull. They are cheap and find
strategies that prune later passes. The last pass is pruned by known strategies only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tensoropt.frontier.tools import Points
from tensoropt.types import Floats

_ROUNDING = 1e-3
"""The share of an allowed gap that is reserved for rounding costs to the grid (``paper._RESOLUTION``), so
that the proven gap does not exceed the allowed one."""


class Bound(Protocol):
    """A lower bound on the time of any strategy, as a function of the memory budget."""

    def bounds(self, memory: Floats) -> Floats:
        """Return lower bounds on the time within each memory budget, (n,); inf if no strategy fits."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Staircase:
    """A step function of the memory budget: ``time[i]`` from ``memory[i]`` up to the next point. ``memory``
    (n,) ascends and ``time`` (n,) descends. No strategy needs to have these costs."""

    memory: Floats
    time: Floats

    def bounds(self, memory: Floats) -> Floats:
        """Return the time of the last point within each memory budget, (n,); inf below the first point."""
        return np.append(np.inf, self.time)[np.searchsorted(self.memory, memory, side="right")]


@dataclass(frozen=True, eq=False, slots=True)
class Highest:
    """The pointwise highest of several lower bounds on the same strategies."""

    parts: Sequence[Bound]

    def bounds(self, memory: Floats) -> Floats:
        return np.max([part.bounds(memory) for part in self.parts], axis=0)


@dataclass(frozen=True, eq=False, slots=True)
class Lowest:
    """The pointwise lowest of bounds on several sets of strategies, as a bound on their union."""

    parts: Sequence[Bound]

    def bounds(self, memory: Floats) -> Floats:
        return np.min([part.bounds(memory) for part in self.parts], axis=0)


def relative_gap(time: Floats, bounds: Floats) -> Floats:
    """Return how much faster than each point a strategy could be, at most: time / bound - 1, at least 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(time <= bounds, 0.0, time / bounds - 1.0)


def lowered(incumbents: Points, epsilon: float) -> Staircase:
    """Return the staircase of the known strategies with times lowered by the relative gap ``epsilon``. A
    strategy that is faster by more than ``epsilon`` than every known one of no more memory lies below it."""
    return Staircase(incumbents.memory, incumbents.time / (1.0 + epsilon * (1.0 - _ROUNDING)))


_SAMPLES = 1024
"""The number of points of a target along the hull, besides those of the known strategies; an assumption."""


def pruning_target(incumbents: Points, distance: float) -> Staircase:
    """Return a staircase to prune a search pass with: that of the known strategies, lowered to the relative
    ``distance`` above their lower convex hull."""
    hull = np.array(lower_hull(zip(incumbents.memory.tolist(), incumbents.time.tolist(), strict=True)))
    with np.errstate(divide="ignore"):
        # Zeros have no logarithm; 1e-12 of the largest cost replaces them (an assumption, which only affects
        # the spacing of samples).
        logs = np.log(np.maximum(hull, hull.max(axis=0) * 1e-12 + 1e-300))
    span = np.maximum(np.ptp(logs, axis=0), 1e-300)
    along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(logs, axis=0) / span).max(axis=1))])
    spots = np.interp(np.linspace(0.0, along[-1], _SAMPLES), along, hull[:, 0])
    memory = np.unique(np.concatenate([spots, incumbents.memory]))
    time = incumbents.time[np.searchsorted(incumbents.memory, memory, side="right") - 1]
    # Close above the hull in time, and close in memory: the former binds at the flat end, the latter at the
    # steep end.
    for stretch, scale in ((1.0, 1.0 + distance), (1.0 / (1.0 + distance), 1.0)):
        above = scale * np.interp(memory * stretch, hull[:, 0], hull[:, 1], left=np.inf)
        time = np.minimum(time, above)
    time = np.maximum(time, incumbents.time[-1])
    kept = np.append(True, np.diff(time) < 0)
    return Staircase(memory[kept], time[kept])


def looseness(incumbents: Points) -> float:
    """Return the mean relative distance of the known strategies' staircase from its lower convex hull.

    At each inner corner of the staircase, the larger of the distances along memory and along time counts.
    """
    hull = np.array(lower_hull(zip(incumbents.memory.tolist(), incumbents.time.tolist(), strict=True)))
    memory, time = incumbents.memory[1:], incumbents.time[:-1]
    if not len(memory):
        return 0.0
    below = np.interp(memory, hull[:, 0], hull[:, 1])
    before = np.interp(time, hull[::-1, 1], hull[::-1, 0])
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.maximum(time / below, memory / before) - 1.0
    return float(distances[np.isfinite(distances)].mean()) if np.isfinite(distances).any() else 0.0


def lower_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the vertices of the lower convex hull of (memory, time) points, in order of memory.

    Andrew's monotone chain. ``points`` come in order of memory; points no faster than a leaner one are left
    out.
    """
    hull: list[tuple[float, float]] = []
    for m, t in points:
        if hull and t >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (t - hull[-2][1]) <= (
            hull[-1][1] - hull[-2][1]
        ) * (m - hull[-2][0]):
            hull.pop()
        hull.append((m, t))
    return hull
