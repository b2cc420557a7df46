"""Sources of strategies: vertices of the hull, mixes of two vertices (crossovers), and search passes.

Crossovers lie between two hull vertices: the first operators take the choices of one vertex, the rest those
of the other. With many equal layers the hull has few vertices and long edges, and along an edge almost every
such mix is close to optimal. One cumulative sum gives the costs of all mixes of a pair. Their points make the
staircase of known strategies tight before any frontier has been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from tensoropt.search.engine import Pass
from tensoropt.search.hull import Hull
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.result import ChosenStrategies, chosen_strategies, unroll
from tensoropt.types import Floats, Indices


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A set of n strategies, given by their costs in any order, (n,). ``rebuild`` returns the strategies of
    given indices, in the caller's numbering."""

    memory: Floats
    time: Floats
    rebuild: Callable[[Indices], ChosenStrategies]


def vertex_source(reduced: ReducedGraph, hull: Hull) -> Source:
    """Return the vertices of a hull as a source."""

    def rebuild(indices: Indices) -> ChosenStrategies:
        return chosen_strategies(reduced, np.stack([hull.picks[i] for i in indices.tolist()]))

    return Source(hull.memory, hull.time, rebuild)


def pass_source(program: Program, result: Pass) -> Source:
    """Return the strategies that a pass has found as a source; it keeps all tables of the pass in memory."""

    def rebuild(indices: Indices) -> ChosenStrategies:
        return chosen_strategies(program.reduced, unroll(program, result, indices))

    root = result.tables[program.logical[program.root].table]
    return Source(root.memory, root.time, rebuild)


def mix_source(reduced: ReducedGraph, hull: Hull) -> Source:
    """Return all crossovers (mixes) of neighbouring hull vertices as a source, in both directions."""
    n, count = len(reduced.domains), len(hull.picks)
    low, high = np.arange(count - 1), np.arange(1, count)
    heads, tails = np.append(low, high), np.append(high, low)
    memory, time = _cuts(reduced, np.stack(hull.picks), heads, tails)
    # Cuts 0 and n are the vertices themselves.
    pair, cut = np.nonzero(np.isfinite(memory[:, 1:n]))
    cut += 1
    head, tail = heads[pair], tails[pair]

    def rebuild(indices: Indices) -> ChosenStrategies:
        picks = _unmix(reduced, hull.picks, head[indices], tail[indices], cut[indices])
        return chosen_strategies(reduced, picks)

    return Source(memory[pair, cut], time[pair, cut], rebuild)


def _cuts(reduced: ReducedGraph, picks: Indices, heads: Indices, tails: Indices) -> tuple[Floats, Floats]:
    """Return memory and time of every crossover of every pair, (pairs, operators + 1); inf if impossible.

    In column c, the first c operators take the choices of the pair's strategy ``heads`` (an index into
    ``picks``), the others those of ``tails``. Edges between the two use their option of least memory.
    """
    n, edges = len(reduced.domains), reduced.edges
    first, offsets, *costs = reduced.points()
    source, target = _ends(reduced)
    low, high = np.minimum(source, target), np.maximum(source, target)
    edge_base = first[np.array([e.leaf for e in edges], np.int64)]
    node = offsets[first[list(reduced.node_leaf)] + picks[:, :n, 0]] + picks[:, :n, 1]
    edge = offsets[edge_base + picks[:, n:, 0]] + picks[:, n:, 1]
    across = np.empty((len(heads), len(edges)), np.int64)
    for number, e in enumerate(edges):
        ends = picks[heads, low[number], 0], picks[tails, high[number], 0]
        a, b = ends if e.source < e.target else ends[::-1]
        across[:, number] = edge_base[number] + e.rows[a] * e.width + e.cols[b]
    possible = offsets[across] < offsets[across + 1]
    # The offset of a trailing empty entry points past all points; ``possible`` masks it.
    mixed = np.minimum(offsets[across], offsets[-1] - 1)
    shape = len(heads), n + 2
    row = np.arange(len(heads))[:, None]
    # Everything is a sum of steps along the cuts. An edge is cut where low < c <= high, so its cost changes
    # only at low + 1 and at high + 1, and one cumulative sum gives all cuts of a pair. It is exact, because
    # differences of costs on the grid are on the grid.
    blocked = np.zeros(shape)
    np.add.at(blocked, (row, low + 1), ~possible)
    np.add.at(blocked, (row, high + 1), -1.0 * ~possible)
    wall = np.cumsum(blocked, axis=1)[:, : n + 1] > 0
    sums = []
    for cost in costs:
        of_node, of_edge = cost[node], cost[edge]
        change = np.zeros(shape)
        change[:, 0] = of_node[tails].sum(axis=1) + of_edge[tails].sum(axis=1)
        change[:, 1 : n + 1] += of_node[heads] - of_node[tails]
        between = np.where(possible, cost[mixed], 0.0)
        np.add.at(change, (row, low + 1), between - of_edge[tails])
        np.add.at(change, (row, high + 1), of_edge[heads] - between)
        sums.append(np.where(wall, np.inf, np.cumsum(change, axis=1)[:, : n + 1]))
    return sums[0], sums[1]


def _ends(reduced: ReducedGraph) -> Indices:
    return np.array([(e.source, e.target) for e in reduced.edges], np.int64).reshape(-1, 2).T


def _unmix(
    reduced: ReducedGraph, picks: Sequence[Indices], heads: Indices, tails: Indices, cuts: Indices
) -> Indices:
    """Return the table entries and points that crossovers use, (n, operators + edges, 2).

    Args:
        picks: the table entries and points of each strategy that is mixed, (operators + edges, 2).
        heads, tails: the two strategies of each crossover, as indices into ``picks``, (n,).
        cuts: the number of first operators that take the choices of ``heads``, (n,).
    """
    n = len(reduced.domains)
    source, target = _ends(reduced)
    used, ends = np.unique(np.concatenate([heads, tails]), return_inverse=True)
    ends = ends.reshape(2, -1)
    given = np.stack([picks[i] for i in used.tolist()])
    mixed = np.empty((len(cuts), *given.shape[1:]), np.int64)
    # An edge belongs to its higher end: if that is below the cut, both ends are.
    last = np.concatenate([np.arange(n), np.maximum(source, target)])
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
