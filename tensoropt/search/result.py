"""The result of a search: the frontier, its certificate, and, on demand, the strategy of any point."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tensoropt.costs.cost_graph import CostGraph
from tensoropt.types import Floats, Indices

SAME = 1e-9
"""Costs that differ by less than this share count as equal: two grids may round one strategy this far apart
(``bands.RESOLUTION``, once for each)."""

OptionKey = Any  # a name, or (source, target, n-th edge between them)


@dataclass(frozen=True, eq=False)
class ChosenStrategies:
    """Strategies of one graph, one per row.

    Attributes:
        names: the operators, one per column, in the graph's order.
        edges: the edges, one per column, as :data:`OptionKey`.
        configurations: (n, operators) the configuration of every operator.
        options: (n, operators) the option of every operator.
        edge_options: (n, edges) the option of every edge.
    """

    names: Sequence[str]
    edges: Sequence[OptionKey]
    configurations: Indices
    options: Indices
    edge_options: Indices

    @staticmethod
    def of(
        graph: CostGraph, configurations: Indices, options: Indices, edge_options: Indices
    ) -> ChosenStrategies:
        """The strategies of a graph."""
        numbers: dict[object, itertools.count[int]] = defaultdict(itertools.count)
        edges = [(e.a, e.b, next(numbers[e.a, e.b])) for e in graph.edges]
        return ChosenStrategies(graph.names, edges, configurations, options, edge_options)

    def at(self, rows: Indices) -> ChosenStrategies:
        """Some of the strategies, in the given order."""
        return replace(
            self,
            configurations=self.configurations[rows],
            options=self.options[rows],
            edge_options=self.edge_options[rows],
        )

    def __len__(self) -> int:
        return len(self.configurations)

    def strategy(self, row: int) -> dict[str, int]:
        """The configuration of each operator, by name."""
        return dict(zip(self.names, self.configurations[row].tolist(), strict=True))

    def options_of(self, row: int) -> dict[OptionKey, int]:
        """The option of each operator, and of each edge under the key (source, target, n-th edge between
        them)."""
        own = dict(zip(self.names, self.options[row].tolist(), strict=True))
        return {**own, **dict(zip(self.edges, self.edge_options[row].tolist(), strict=True))}


def budget(memory: float) -> Floats:
    """(1,) a memory budget in the form that bounds take; ``ValueError`` if it is NaN."""
    if np.isnan(memory):
        raise ValueError("the memory budget is NaN; give bytes, or inf for no limit")
    return np.array([memory], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class TrackedFrontier:
    """The cost frontier of a graph, with its certificate.

    ``memory`` (n,) bytes, ascending; ``time`` (n,) seconds, strictly descending. ``exact`` is True only if it
    is proven that no strategy beats or is missing from these points (in the additive model, every point
    within 4e-10 of its own cost). ``notes`` say in words what was heuristic, and are empty if nothing was.
    Another process receives the strategies themselves (``pickle``), not the tables from which they are
    rebuilt.
    """

    memory: Floats
    time: Floats
    exact: bool
    notes: tuple[str, ...]
    unroll: Callable[[Indices], ChosenStrategies] = field(repr=False)
    bounds: Callable[[Floats], Floats] = field(repr=False)
    _cache: dict[int, ChosenStrategies] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuilt = self.strategies()
        return TrackedFrontier, (self.memory, self.time, self.exact, self.notes, rebuilt.at, self.bounds)

    def __repr__(self) -> str:
        word = "exact" if self.exact else "not proven exact"
        return f"TrackedFrontier({len(self.memory)} points, {word})"

    def lower_bound(self, memory: float) -> float:
        """A time that no strategy within ``memory`` bytes can beat; inf if none fits.

        Raises ``ValueError`` if ``memory`` is NaN.
        """
        return float(self.bounds(budget(memory))[0])

    @property
    def gap(self) -> Floats:
        """(n,) for each point: how much faster, at most, a strategy with no more memory could be (time /
        bound - 1).
        """
        bounds = self.bounds(self.memory)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.time <= bounds, 0.0, self.time / bounds - 1.0)

    @property
    def worst_gap(self) -> float:
        """Largest gap over all memory budgets, including those between the points: 0 for an exact frontier.

        Budgets that rounding cannot distinguish from the next point's memory are left out.
        """
        if self.exact or not len(self.memory):
            return 0.0
        bounds = self.bounds(np.append(self.memory[1:] * (1.0 - SAME), np.inf))
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(self.time <= bounds, 0.0, self.time / bounds - 1.0).max(initial=0.0))

    def strategies(self, indices: ArrayLike | None = None) -> ChosenStrategies:
        """The strategies of many points (by default all), rebuilt together."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, np.int64)
        wrong = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if len(wrong):
            raise IndexError(f"point {wrong[0]} of a frontier with {len(self)} points")
        return self.unroll(chosen % max(len(self), 1))

    def strategy(self, index: int) -> dict[str, int]:
        """The configuration of every operator at point ``index``; only this point is rebuilt."""
        return self._chosen(index).strategy(0)

    def options(self, index: int) -> dict[OptionKey, int]:
        """Option of every operator, and of every edge under the key (source, target, n-th edge of theirs)."""
        return self._chosen(index).options_of(0)

    def _chosen(self, index: int) -> ChosenStrategies:
        if index not in self._cache:
            self._cache[index] = self.strategies([index])
        return self._cache[index]
