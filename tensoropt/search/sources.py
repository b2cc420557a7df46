"""Sources of strategies: hull vertices, crossovers, passes. Each can rebuild any of its points.

Crossovers lie between two hull vertices: the first operators of one, the rest of the other. With many equal
layers the hull has few vertices and long edges, and along an edge almost every prefix mix is close to
optimal. All cuts of a pair take one cumulative sum, and the resulting points make the upper staircase tight
before any frontier has been computed. They are real strategies and can be unrolled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit

from tensoropt.search.engine import Pass
from tensoropt.search.hull import Hull
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.result import ChosenStrategies, chosen_strategies, unroll
from tensoropt.types import Floats, Indices


@dataclass(frozen=True, eq=False, slots=True)
class _Mixes:
    """Crossovers: point ``p`` takes operators below ``cut[p]`` from pick ``head[p]``, and the others from
    ``tail[p]``.
    """

    memory: Floats
    time: Floats
    head: Indices
    tail: Indices
    cut: Indices


def mix_neighbours(reduced: ReducedGraph, picks: Sequence[Indices]) -> _Mixes:
    """Return all prefix mixes of neighbouring picks, in both directions.

    ``picks[i]`` (operators + edges, 2): the class and point of every operator, and the entry and point of
    every edge, sorted by memory of the whole strategy.
    """
    n = len(reduced.domains)
    if n < 2 or len(picks) < 2:
        nothing, none = np.zeros(0), np.zeros(0, np.int64)
        return _Mixes(nothing, nothing, none, none, none)
    low, high = np.arange(len(picks) - 1), np.arange(1, len(picks))
    heads, tails = np.append(low, high), np.append(high, low)
    memory, time = _Tables(reduced).cuts(np.stack(picks), heads, tails)
    # Cuts 0 and n are the vertices themselves.
    pair, cut = np.nonzero(np.isfinite(memory[:, 1:n]))
    cut += 1
    return _Mixes(memory[pair, cut], time[pair, cut], heads[pair], tails[pair], cut)


class _Tables:
    def __init__(self, reduced: ReducedGraph) -> None:
        base, leaf_first, entries, points = [], [], 0, 0
        for leaf in reduced.leaves:
            leaf_first.append(entries)
            base.append(leaf.offsets[:-1] + points)
            entries += len(leaf.offsets) - 1
            points += len(leaf.memory)
        self.offsets = np.append(np.concatenate(base), points)
        self.memory = np.concatenate([x.memory for x in reduced.leaves])
        self.time = np.concatenate([x.time for x in reduced.leaves])
        first = np.array(leaf_first, np.int64)
        self.node_base = first[np.array(reduced.node_leaf, np.int64)]
        self.edge_base = first[np.array([e.leaf for e in reduced.edges], np.int64)]
        self.source = np.array([e.source for e in reduced.edges], np.int64)
        self.target = np.array([e.target for e in reduced.edges], np.int64)
        self.low = np.minimum(self.source, self.target)
        self.high = np.maximum(self.source, self.target)
        edges = reduced.edges
        self.width = np.array([e.width for e in edges], np.int64)
        self.rows, self.rows_at = _flat([e.rows for e in edges])
        self.cols, self.cols_at = _flat([e.cols for e in edges])

    def mixed_entries(self, low: Indices, high: Indices) -> Indices:
        """Return the entry of every edge whose lower operator has class ``low`` and whose higher one has
        class ``high``."""
        forward = self.source < self.target
        i, j = np.where(forward, low, high), np.where(forward, high, low)
        return self.rows[self.rows_at + i] * self.width + self.cols[self.cols_at + j]

    def cuts(self, picks: Indices, heads: Indices, tails: Indices) -> tuple[Floats, Floats]:
        """Return (pairs, operators + 1) memory and time for every cut of every pair of picks; inf if
        impossible.

        Edges across the cut use their option with the least memory.
        """
        n = len(self.node_base)
        node = self.offsets[self.node_base + picks[:, :n, 0]] + picks[:, :n, 1]
        edge = self.offsets[self.edge_base + picks[:, n:, 0]] + picks[:, n:, 1]
        across = self.edge_base + self.mixed_entries(
            picks[heads][:, self.low, 0], picks[tails][:, self.high, 0]
        )
        possible = self.offsets[across] < self.offsets[across + 1]
        # The offset of a trailing empty entry points past all points; ``possible`` masks it.
        mixed = np.minimum(self.offsets[across], len(self.memory) - 1)
        shape = len(heads), n + 2
        row = np.arange(len(heads))[:, None]
        # Everything is a sum of steps along the cuts. An edge is cut where low < c <= high, so its cost
        # changes only at low + 1 and at high + 1, and one cumulative sum gives all cuts of a pair. It is
        # exact, because differences of costs on the grid are on the grid.
        blocked = np.zeros(shape)
        np.add.at(blocked, (row, self.low + 1), ~possible)
        np.add.at(blocked, (row, self.high + 1), -1.0 * ~possible)
        wall = np.cumsum(blocked, axis=1)[:, : n + 1] > 0
        sums = []
        for cost in (self.memory, self.time):
            of_node, of_edge = cost[node], cost[edge]
            change = np.zeros(shape)
            change[:, 0] = of_node[tails].sum(axis=1) + of_edge[tails].sum(axis=1)
            change[:, 1 : n + 1] += of_node[heads] - of_node[tails]
            between = np.where(possible, cost[mixed], 0.0)
            np.add.at(change, (row, self.low + 1), between - of_edge[tails])
            np.add.at(change, (row, self.high + 1), of_edge[heads] - between)
            sums.append(np.where(wall, np.inf, np.cumsum(change, axis=1)[:, : n + 1]))
        return sums[0], sums[1]


def _flat(maps: list[Indices]) -> tuple[Indices, Indices]:
    sizes = [len(m) for m in maps]
    return (
        np.concatenate([np.zeros(0, np.int64), *maps]),
        np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])[: len(maps)].astype(np.int64),
    )


def _unmix(
    reduced: ReducedGraph, picks: Sequence[Indices], heads: Indices, tails: Indices, cuts: Indices
) -> Indices:
    """Return (n, operators + edges, 2) the picks of mixes, each made from a head's pick and a tail's.

    Args:
        picks: those of the strategies that are mixed, each (operators + edges, 2).
        heads, tails: (n,) indices into these; ``cuts``: (n,) the operator below which the head's picks are
            used.
    """
    n = len(reduced.domains)
    source = np.array([e.source for e in reduced.edges], np.int64)
    target = np.array([e.target for e in reduced.edges], np.int64)
    used, ends = np.unique(np.concatenate([heads, tails]), return_inverse=True)
    ends = ends.reshape(2, -1)
    given = np.stack([picks[i] for i in used.tolist()])
    mixed = np.empty((len(cuts), *given.shape[1:]), np.int64)
    # An edge belongs to its higher end: if that is below the cut, both ends are.
    last = np.concatenate([np.arange(n), np.maximum(source, target)])
    expected = len(cuts), len(last), 2
    assert mixed.shape == expected, f"{mixed.shape} picks for {expected}"
    assert ends.shape == (2, len(cuts)), f"{ends.shape} ends of {len(cuts)} cuts"
    _mix(given, ends[0], ends[1], cuts, last, mixed)
    cut = cuts[:, None]
    rows, numbers = np.nonzero((source < cut) != (target < cut))
    for number in np.unique(numbers).tolist():
        e, where = reduced.edges[number], rows[numbers == number]
        entry = e.rows[mixed[where, e.source, 0]] * e.width + e.cols[mixed[where, e.target, 0]]
        mixed[where, n + number, 0], mixed[where, n + number, 1] = entry, 0
    return mixed


@njit(cache=True, nogil=True)
def _mix(picks, heads, tails, cuts, last, mixed):
    for m in range(mixed.shape[0]):
        head, tail, cut = picks[heads[m]], picks[tails[m]], cuts[m]
        for i in range(last.shape[0]):
            if last[i] < cut:
                mixed[m, i, 0], mixed[m, i, 1] = head[i, 0], head[i, 1]
            else:
                mixed[m, i, 0], mixed[m, i, 1] = tail[i, 0], tail[i, 1]


class Source(Protocol):
    """Strategies with their costs (n,), in any order; ``rebuild`` returns some of them, in the caller's
    names."""

    @property
    def memory(self) -> Floats: ...

    @property
    def time(self) -> Floats: ...

    def rebuild(self, indices: Indices) -> ChosenStrategies: ...


@dataclass(frozen=True, eq=False, slots=True)
class VertexSource:
    """The vertices of a hull, whose picks are already known."""

    reduced: ReducedGraph
    hull: Hull

    @property
    def memory(self) -> Floats:
        return self.hull.memory

    @property
    def time(self) -> Floats:
        return self.hull.time

    def rebuild(self, indices: Indices) -> ChosenStrategies:
        return chosen_strategies(self.reduced, np.stack([self.hull.picks[i] for i in indices.tolist()]))


@dataclass(frozen=True, eq=False, slots=True)
class MixSource:
    """Prefix mixes of two hull vertices, put together on demand."""

    reduced: ReducedGraph
    hull: Hull
    mixes: _Mixes

    @property
    def memory(self) -> Floats:
        return self.mixes.memory

    @property
    def time(self) -> Floats:
        return self.mixes.time

    def rebuild(self, indices: Indices) -> ChosenStrategies:
        m = self.mixes
        head, tail, cut = (np.asarray(of[indices], np.int64) for of in (m.head, m.tail, m.cut))
        return chosen_strategies(self.reduced, _unmix(self.reduced, self.hull.picks, head, tail, cut))


@dataclass(frozen=True, eq=False, slots=True)
class PassSource:
    """Points at the root of a pass; its tables stay in memory, since strategies are unrolled from them."""

    program: Program
    result: Pass

    @property
    def memory(self) -> Floats:
        return self.result.tables[self.program.logical[self.program.root].table].memory

    @property
    def time(self) -> Floats:
        return self.result.tables[self.program.logical[self.program.root].table].time

    def rebuild(self, indices: Indices) -> ChosenStrategies:
        return chosen_strategies(self.program.reduced, unroll(self.program, self.result, indices))
