"""The result of a search: the frontier, bounds that certify it, and, on demand, the strategy of any point.

A certificate can also cover points of several cost graphs, such as those of several meshes.

The strategies of points are recovered by unrolling the eliminations in reverse. Tables record only the index
k of the best choice. The two points that were added are found by their sum, which is exact as costs are
multiples of a power of two. So a point costs 20 bytes instead of 28, and only requested points are rebuilt,
all in one compiled call.

A *pick* (operators + edges, 2) says which entry, and which of its points, every operator and edge uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from tensoropt.costs.cost_graph import CostGraph, edge_keys
from tensoropt.frontier.kernels import find_pair
from tensoropt.search.bounds import relative_gap
from tensoropt.search.engine import Pass
from tensoropt.search.hull import flatten
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.types import Floats, Indices

SAME = 1e-9
"""The relative difference below which costs count as equal: two grids may round one strategy this far apart
(``paper._RESOLUTION``, once for each)."""

_OptionKey = Any  # a name, or (source, target, n-th edge between them)


@dataclass(frozen=True, eq=False)
class ChosenStrategies:
    """Strategies of one graph, one per row.

    Attributes:
        names: the operators, one per column, in the graph's order.
        edges: the edges, one per column: (source, target, n-th edge between them).
        configurations: the configuration of every operator, (n, operators).
        options: the option of every operator, (n, operators).
        edge_options: the option of every edge, (n, edges).
    """

    names: Sequence[str]
    edges: Sequence[_OptionKey]
    configurations: Indices
    options: Indices
    edge_options: Indices

    @staticmethod
    def of(
        graph: CostGraph, configurations: Indices, options: Indices, edge_options: Indices
    ) -> ChosenStrategies:
        return ChosenStrategies(graph.names, edge_keys(graph.edges), configurations, options, edge_options)

    def at(self, rows: Indices) -> ChosenStrategies:
        """Return the strategies of the given rows, in the given order."""
        return replace(
            self,
            configurations=self.configurations[rows],
            options=self.options[rows],
            edge_options=self.edge_options[rows],
        )

    def __len__(self) -> int:
        return len(self.configurations)

    def strategy(self, row: int) -> dict[str, int]:
        """Return the configuration of each operator, by name."""
        return dict(zip(self.names, self.configurations[row].tolist(), strict=True))

    def options_of(self, row: int) -> dict[_OptionKey, int]:
        """Return the option of each operator, and of each edge by (source, target, n-th edge of the pair)."""
        own = dict(zip(self.names, self.options[row].tolist(), strict=True))
        return {**own, **dict(zip(self.edges, self.edge_options[row].tolist(), strict=True))}


@dataclass(frozen=True, eq=False)
class TrackedFrontier:
    """The memory-time frontier of a cost graph, with lower bounds on what any strategy can reach.

    ``memory`` (n,) in bytes ascends; ``time`` (n,) in seconds strictly descends. ``exact`` is True only if it
    is proven that no strategy beats one of these points, and that none is missing (in the additive model, up
    to rounding by at most 4e-10 of a cost). ``notes`` say what was heuristic. ``unroll`` rebuilds strategies
    by index; ``bounds`` gives a lower bound on the time for each memory budget. ``pickle`` sends the
    strategies themselves to another process, not the tables from which they are rebuilt.
    """

    memory: Floats
    time: Floats
    exact: bool
    notes: tuple[str, ...]
    unroll: Callable[[Indices], ChosenStrategies] = field(repr=False)
    bounds: Callable[[Floats], Floats] = field(repr=False)

    def __len__(self) -> int:
        return len(self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuilt = self.strategies()
        return TrackedFrontier, (self.memory, self.time, self.exact, self.notes, rebuilt.at, self.bounds)

    def __repr__(self) -> str:
        word = "exact" if self.exact else "not proven exact"
        return f"TrackedFrontier({len(self.memory)} points, {word})"

    def lower_bound(self, memory: float) -> float:
        """Return a lower bound on the time in seconds of strategies within ``memory`` bytes; inf if none.

        Raises ``ValueError`` if ``memory`` is NaN.
        """
        if np.isnan(memory):
            raise ValueError("the memory budget is NaN; give bytes, or inf for no limit")
        return float(self.bounds(np.array([memory], dtype=np.float64))[0])

    @property
    def gap(self) -> Floats:
        """How much faster than each point, at most, a strategy of no more memory can be: time / bound - 1."""
        return relative_gap(self.time, self.bounds(self.memory))

    @property
    def worst_gap(self) -> float:
        """The largest gap at any memory budget, also between the points; 0 for an exact frontier.

        Budgets that rounding cannot distinguish from the next point's memory are left out.
        """
        if self.exact or not len(self.memory):
            return 0.0
        bounds = self.bounds(np.append(self.memory[1:] * (1.0 - SAME), np.inf))
        return float(relative_gap(self.time, bounds).max(initial=0.0))

    def strategies(self, indices: ArrayLike | None = None) -> ChosenStrategies:
        """Return the strategies of many points (by default all), rebuilt together."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, np.int64)
        wrong = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if len(wrong):
            raise IndexError(f"there is no point {wrong[0]}: the frontier has {len(self)}, counted from 0")
        return self.unroll(chosen % max(len(self), 1))

    def strategy(self, index: int) -> dict[str, int]:
        """Return the configuration of every operator at point ``index``; only this point is rebuilt."""
        return self.strategies([index]).strategy(0)

    def options(self, index: int) -> dict[_OptionKey, int]:
        """Return the option of each operator, and of each edge by (source, target, n-th edge of the pair)."""
        return self.strategies([index]).options_of(0)


def _least_bounds(parts: Sequence[TrackedFrontier], memory: Floats) -> Floats:
    """Return lower bounds on the time of any part's strategies within ``memory``, (n,)."""
    return np.min([np.full(len(memory), np.inf), *(part.bounds(memory) for part in parts)], axis=0)


def certify(
    parts: Sequence[TrackedFrontier], memory: Floats, time: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return (gap, exact), each (n,), of strategies with these costs among *all* strategies of ``parts``.

    ``gap`` is how much faster, at most, any strategy with no more memory could be (time over the bound, minus
    1). ``exact`` says that none is better in either cost: neither faster within that memory, nor as fast with
    less. A point of one part need not be exact among all, as a strategy of another part can beat it.
    """
    bounds = _least_bounds(parts, memory)
    gap = np.where(time <= bounds * (1 + SAME), 0.0, relative_gap(time, bounds))
    # The memory minus what rounding cannot explain; for no memory at all, a budget that nothing fits.
    with_less = _least_bounds(parts, np.where(memory > 0, memory * (1 - SAME), -1.0))
    return gap, (gap == 0) & (time < with_less)


def unroll(program: Program, result: Pass, points: Indices) -> Indices:
    """Return the table entries and points that make up given points of the program's root table,
    (n, operators + edges, 2)."""
    flat = flatten(program)
    counts = np.concatenate([np.diff(table.offsets) for table in result.tables])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    memory, time, label = (
        np.concatenate([getattr(table, name) for table in result.tables])
        for name in ("memory", "time", "label")
    )
    picks = np.zeros((len(points), program.inputs, 2), np.int64)
    tables = offsets, memory, time, label
    matched = _unroll_points(*flat.index, flat.tree, *tables, program.root, np.asarray(points), picks)
    assert matched, "a point of a product is the sum of two points"
    return picks


@njit(cache=True, nogil=True)
def _unroll_points(
    meta, left_out, left_k, right_out, right_k, tree, offsets, memory, time, label, root, points, picks
):
    """Fill ``picks`` with the entries and points that make up ``points``; return whether all were found.

    ``memory``, ``time`` and ``label`` hold the points of all tables, whose entries begin at ``offsets``.
    """
    inputs = picks.shape[1]
    # A stack instead of recursion: the tree of factors can be as deep as the graph has operators.
    stack = np.empty((tree.shape[0] + 1, 3), np.int64)
    for n in range(points.shape[0]):
        stack[0, 0], stack[0, 1], stack[0, 2] = root, 0, points[n]
        depth = 1
        while depth > 0:
            depth -= 1
            node, entry, point = stack[depth, 0], stack[depth, 1], stack[depth, 2]
            base, s, left_node, right_node = tree[node]
            if s < 0:
                # A leaf that is not an input is the empty product.
                if node < inputs:
                    picks[n, node, 0] = entry
                    picks[n, node, 1] = point
                continue
            _, left, right, _, _, at_out, at_k = meta[s]
            at = offsets[base + entry] + point
            k = label[at]
            i = left_out[at_out + entry] + left_k[at_k + k]
            j = right_out[at_out + entry] + right_k[at_k + k]
            a0, a1 = offsets[left + i], offsets[left + i + 1]
            b0, b1 = offsets[right + j], offsets[right + j + 1]
            p, q = find_pair(memory[a0:a1], time[a0:a1], memory[b0:b1], time[b0:b1], memory[at], time[at])
            if p < 0:
                return False
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = left_node, i, p
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = right_node, j, q
            depth += 2
    return True


def chosen_strategies(reduced: ReducedGraph, picks: Indices) -> ChosenStrategies:
    """Return the configurations and options, in the caller's numbering, of strategies given by the table
    entry and point that each operator and edge uses (``picks``, (n, operators + edges, 2))."""
    columns = [*reduced.node_leaf, *(edge.leaf for edge in reduced.edges)]
    configurations, options = np.empty((2, len(picks), len(columns)), np.int64)
    for v, number in enumerate(columns):
        leaf = reduced.leaves[number]
        at = leaf.offsets[picks[:, v, 0]] + picks[:, v, 1]
        configurations[:, v], options[:, v] = leaf.configuration[at], leaf.option[at]
    # Copies of operators that were split come after the graph's own operators.
    n, first = len(reduced.graph.names), len(reduced.domains)
    return ChosenStrategies.of(reduced.graph, configurations[:, :n], options[:, :n], options[:, first:])
