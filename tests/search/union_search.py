"""The frontier over several cost graphs at once, which bounds of all of them can be tested and timed on.

Every graph is searched with what the earlier ones found as rivals: whatever they beat is pruned, so a mesh
whose bounds lie above the frontier costs its scalar problems only. Put promising graphs first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.costs.cost_graph import CostGraph
from tensoropt.frontier import merge
from tensoropt.frontier.tools import IndexArray
from tensoropt.search.result import OptionKey, TrackedFrontier, budget, least_bounds
from tensoropt.search.track import check_settings, track
from tensoropt.types import Floats


@dataclass(frozen=True, eq=False)
class UnionFrontier:
    """Points over several graphs; ``origin`` (n, 2): which graph, and which point of ``parts[which]``.

    A part alone is not a frontier of its graph: it lacks what other graphs beat. ``exact``: nothing is
    missing from the union.
    """

    memory: Floats
    time: Floats
    origin: IndexArray
    parts: tuple[TrackedFrontier, ...]
    exact: bool

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was heuristic, over all graphs."""
        return tuple(dict.fromkeys(note for part in self.parts for note in part.notes))

    def lower_bound(self, memory: float) -> float:
        """A time that no strategy of any graph within ``memory`` bytes can beat; inf where none fits.

        Raises ``ValueError`` where ``memory`` is NaN.
        """
        return float(self.bounds(budget(memory))[0])

    def bounds(self, memory: Floats) -> Floats:
        """(n,) :meth:`lower_bound` for many budgets."""
        best = least_bounds(self.parts, memory)
        if not self.exact:
            return best
        times = np.append(np.inf, self.time)
        return np.minimum(best, times[np.searchsorted(self.memory, memory, side="right")])

    @property
    def gap(self) -> Floats:
        """(n,) per point: how much faster, at most, any strategy of no more memory could be."""
        bounds = self.bounds(self.memory)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.time <= bounds, 0.0, self.time / bounds - 1.0)

    def graph(self, index: int) -> int:
        """Which graph point ``index`` comes from."""
        return int(self.origin[index, 0])

    def strategy(self, index: int) -> dict[str, int]:
        """Configuration of every operator of that graph at point ``index``."""
        which, point = self.origin[index].tolist()
        return self.parts[which].strategy(point)

    def options(self, index: int) -> dict[OptionKey, int]:
        """Option of every operator and edge of that graph at point ``index``."""
        which, point = self.origin[index].tolist()
        return self.parts[which].options(point)


def track_union(
    graphs: Iterable[CostGraph],
    *,
    epsilon: float = 0.0,
    max_points: int | None = None,
    threads: int | None = None,
) -> UnionFrontier:
    """The frontier over all ``graphs``, which may be made one after the other by a generator.

    Settings as for :func:`~tensoropt.search.track_frontier`. Raises ``ValueError`` for bad settings, and for
    a graph in which nothing is possible.
    """
    settings = check_settings(epsilon, "auto", max_points, threads)
    parts: list[TrackedFrontier] = []
    for graph in graphs:
        # Bounds of a part hold for its own graph; its points are rivals for all that follow.
        known = merge(parts) if parts else None
        parts.append(track(graph, "auto", replace(settings, rivals=known)))
    merged = merge(parts)
    memory, time, origin = merged.memory, merged.time, merged.origin
    # Each part is exact where its rivals leave room, and the rivals are in the union.
    exact = all(part.exact for part in parts)
    if exact:  # a point above the bound is beaten by one that only rounding keeps apart from it
        kept = time <= least_bounds(parts, memory)
        memory, time, origin = memory[kept], time[kept], origin[kept]
    return UnionFrontier(memory, time, origin, tuple(parts), exact)
