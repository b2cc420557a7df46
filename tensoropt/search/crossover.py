"""Strategies between two hull vertices: the first operators of one, the rest of the other.

With many equal layers the hull has few vertices and long edges, and along an edge almost every prefix
mix is close to optimal. All cuts of a pair cost one cumulative sum, and the points found make the upper
staircase tight before any frontier has been computed. They are real strategies and can be unrolled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensoropt.search.costgraph import FloatArray, IntArray
from tensoropt.search.problem import Problem

Pick = tuple[IntArray, IntArray]


@dataclass(frozen=True, eq=False, slots=True)
class Mixes:
    """Crossovers: point ``p`` takes operators below ``cut[p]`` from pick ``head[p]``, others from
    ``tail[p]``.
    """

    memory: FloatArray
    time: FloatArray
    head: IntArray
    tail: IntArray
    cut: IntArray


def mix_neighbours(problem: Problem, picks: Sequence[IntArray]) -> Mixes:
    """All prefix mixes of neighbouring picks, both ways.

    ``picks[i]`` (operators + edges, 2): class and point of every operator, entry and point of every edge,
    sorted by memory of the whole strategy.
    """
    tables = _Tables(problem)
    pairs = [(i, i + 1) for i in range(len(picks) - 1)]
    pairs += [(b, a) for a, b in pairs]
    n = len(problem.domains)
    memory, time, head, tail, cuts = [], [], [], [], []
    for a, b in pairs:
        m, t = tables.cuts(picks[a], picks[b])
        inner = np.flatnonzero(np.isfinite(m[1:n]) & np.isfinite(t[1:n])) + 1
        memory.append(m[inner])
        time.append(t[inner])
        head.append(np.full(len(inner), a))
        tail.append(np.full(len(inner), b))
        cuts.append(inner)
    none = np.zeros(0)
    joined = [np.concatenate([none, *x]) for x in (memory, time, head, tail, cuts)]
    return Mixes(joined[0], joined[1], *(x.astype(np.int64) for x in joined[2:]))


class _Tables:
    """Leaf points of a problem in flat form, for adding up strategies."""

    def __init__(self, problem: Problem) -> None:
        base, leaf_first, entries, points = [], [], 0, 0
        for leaf in problem.leaves:
            leaf_first.append(entries)
            base.append(leaf.offsets[:-1] + points)
            entries += len(leaf.offsets) - 1
            points += len(leaf.memory)
        self.offsets = np.append(np.concatenate(base), points)
        self.memory = np.concatenate([x.memory for x in problem.leaves])
        self.time = np.concatenate([x.time for x in problem.leaves])
        first = np.array(leaf_first, np.int64)
        self.node_base = first[np.array(problem.node_leaf, np.int64)]
        self.edge_base = first[np.array([e.leaf for e in problem.edges], np.int64)]
        self.source = np.array([e.source for e in problem.edges], np.int64)
        self.target = np.array([e.target for e in problem.edges], np.int64)
        self.low = np.minimum(self.source, self.target)
        self.high = np.maximum(self.source, self.target)
        self.problem = problem

    def mixed_entries(self, low: IntArray, high: IntArray) -> IntArray:
        """Entry of every edge when its lower operator has class ``low`` and its higher one ``high``."""
        forward = self.source < self.target
        i, j = np.where(forward, low, high), np.where(forward, high, low)
        edges = self.problem.edges
        rows = np.array([e.rows[k] for e, k in zip(edges, i.tolist(), strict=True)], np.int64)
        cols = np.array([e.cols[k] for e, k in zip(edges, j.tolist(), strict=True)], np.int64)
        return rows * np.array([e.width for e in edges], np.int64) + cols

    def cuts(self, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        """(operators + 1,) memory and time for every cut; inf where the mix is impossible.

        Edges across the cut take their option of least memory.
        """
        n = len(self.node_base)
        points = []
        for pick in (a, b):
            node = self.offsets[self.node_base + pick[:n, 0]] + pick[:n, 1]
            edge = self.offsets[self.edge_base + pick[n:, 0]] + pick[n:, 1]
            points.append((node, edge))
        across = self.edge_base + self.mixed_entries(a[self.low, 0], b[self.high, 0])
        possible = self.offsets[across] < self.offsets[across + 1]
        mixed = self.offsets[across]
        found = []
        for cost in (self.memory, self.time):
            change = np.zeros(n + 2)
            (node_a, edge_a), (node_b, edge_b) = points
            change[0] = cost[node_b].sum() + cost[edge_b].sum()
            change[1 : n + 1] += cost[node_a] - cost[node_b]
            between = np.where(possible, cost[np.minimum(mixed, len(cost) - 1)], 0.0)
            np.add.at(change, self.low + 1, between - cost[edge_b])
            np.add.at(change, self.high + 1, cost[edge_a] - between)
            found.append(np.cumsum(change)[: n + 1])
        blocked = np.zeros(n + 2)
        np.add.at(blocked, self.low + 1, ~possible)
        np.add.at(blocked, self.high + 1, -1.0 * ~possible)
        wall = np.cumsum(blocked)[: n + 1] > 0
        return np.where(wall, np.inf, found[0]), np.where(wall, np.inf, found[1])


def unmix(problem: Problem, a: IntArray, b: IntArray, cut: int) -> IntArray:
    """The pick (operators + edges, 2) of one mix."""
    n = len(problem.domains)
    pick = b.copy()
    pick[:cut] = a[:cut]
    for i, e in enumerate(problem.edges):
        below = (e.source < cut) + (e.target < cut)
        if below == 2:
            pick[n + i] = a[n + i]
        elif below == 1:
            entry = int(e.rows[pick[e.source, 0]]) * e.width + int(e.cols[pick[e.target, 0]])
            pick[n + i] = entry, 0
    return pick
