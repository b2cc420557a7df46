"""The reduced graph that the search works on: configurations that look alike from outside are merged.

Configurations of an operator that use the same rows and columns of all its edges' tables (they agree on every
placement) form one *class*. No other operator can distinguish them, so their frontiers are united before the
search. Costs are snapped (rounded to multiples of a power of two), so that sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tensoropt.costs.cost_graph import CostGraph
from tensoropt.frontier.tools import segmented_staircase
from tensoropt.search.flat_tables import FlatTable, FlatTables
from tensoropt.types import Floats, Indices

_GRID_BITS = 52
"""The bits of sums on the grid. A float64 holds integers up to 2**53 exactly; with 52 bits, any sum of costs
is such an integer, with one bit left for rounding each cost to the grid."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of the search: table entries with more memory or time count as impossible."""

    memory: float = math.inf
    time: float = math.inf


UNLIMITED = Caps()


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """An input table of the search, the costs of an operator or edge: entry ``e`` has points
    ``offsets[e]:offsets[e + 1]``.

    ``configuration``, ``option`` (points,) are the choice that a point stands for; an edge has no
    configuration (-1).
    """

    offsets: Indices
    memory: Floats
    time: Floats
    configuration: Indices
    option: Indices

    def only(self, mask: NDArray[np.bool_]) -> Leaf:
        """Return the table of only those entries that ``mask`` (entries,) marks."""
        sizes = np.diff(self.offsets)
        points = np.repeat(mask, sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes[mask])]).astype(np.int64)
        memory, time = self.memory[points], self.time[points]
        return Leaf(offsets, memory, time, self.configuration[points], self.option[points])


@dataclass(frozen=True, eq=False, slots=True)
class LeafEdge:
    """An edge; a pair of classes (a of ``source``, b of ``target``) has the costs of entry ``rows[a] * width
    + cols[b]`` of input table ``leaf``."""

    source: int
    target: int
    leaf: int
    height: int
    width: int
    rows: Indices
    cols: Indices


@dataclass(frozen=True, eq=False, slots=True)
class ReducedGraph:
    """A :class:`CostGraph` for the search: configurations that look alike from outside form one class.

    ``domains[v]`` is the number of classes of operator v, ``node_leaf[v]`` its input table, with one entry
    per class. ``edges[n]`` belongs to the graph's n-th edge. ``memory_grid``, ``time_grid`` are the units of
    which rounded costs are multiples. ``memory_error``, ``time_error`` are the most by which a strategy's
    rounded cost can differ from the sum of the given costs. ``memory_tolerance`` (0 if no cost was changed)
    also covers the rounding of a budget, which may be a sum of costs in any order.
    """

    tables: FlatTables
    leaves: tuple[Leaf, ...]
    domains: tuple[int, ...]
    node_leaf: tuple[int, ...]
    edges: tuple[LeafEdge, ...]
    memory_grid: float
    time_grid: float
    memory_error: float
    time_error: float

    @property
    def graph(self) -> CostGraph:
        """The cost graph that was reduced."""
        return self.tables.graph

    def points(self) -> tuple[Indices, Indices, Floats, Floats]:
        """Return the index of each table's first entry; offsets, memory and time of all entries' points."""
        counts = [np.diff(leaf.offsets) for leaf in self.leaves]
        first = np.cumsum([0, *map(len, counts[:-1])])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        memory = np.concatenate([leaf.memory for leaf in self.leaves])
        return first, offsets, memory, np.concatenate([leaf.time for leaf in self.leaves])

    @property
    def memory_tolerance(self) -> float:
        tables = len(self.tables.nodes) + len(self.tables.edges)
        return self.memory_error + 0.5 * tables * self.memory_grid if self.memory_error else 0.0


def reduce_graph(flat: FlatTables, caps: Caps = UNLIMITED) -> ReducedGraph:
    """Return the reduced graph of a cost graph: rounded costs, no impossible configurations, and
    configurations merged that agree on every placement.

    Entries beyond ``caps`` count as impossible; strategies within them keep their costs.
    """
    graph, given = flat.graph, [*flat.nodes, *flat.edges]
    # Equal tables are one object (FlatTables.of), so each is cut and snapped once.
    within = {id(t): t if caps == UNLIMITED else _within(t, caps) for t in given}
    tables = [within[id(t)] for t in given]
    memory_grid = _grid([t.memory for t in tables], caps.memory)
    time_grid = _grid([t.time for t in tables], caps.time)
    snapped: dict[int, FlatTable] = {}
    moved: dict[int, tuple[float, float]] = {}
    for number, table in {id(t): t for t in tables}.items():
        memory, memory_moved = _snapped(table.memory, memory_grid)
        time, time_moved = _snapped(table.time, time_grid)
        snapped[number] = replace(table, memory=memory, time=time)
        moved[number] = memory_moved, time_moved
    memory_error, time_error = (math.fsum(moved[id(t)][i] for t in tables) for i in (0, 1))
    tables = [snapped[id(t)] for t in tables]

    leaves: list[Leaf] = []
    made: dict[int, tuple[int, Indices, Indices]] = {}
    numbers = {name: number for number, name in enumerate(graph.names)}
    raw_maps: list[list[Indices]] = [[] for _ in flat.nodes]
    edge_leaf = []
    for edge, edge_table in zip(graph.edges, tables[len(flat.nodes) :], strict=True):
        key = id(edge_table)
        if key not in made:
            leaf, rows, cols = _edge_leaf(edge_table)
            leaves.append(leaf)
            made[key] = len(leaves) - 1, rows, cols
        index, rows, cols = made[key]
        edge_leaf.append((index, int(rows.max()) + 1, int(cols.max()) + 1))
        raw_maps[numbers[edge.a]].append(rows[edge.rows])
        raw_maps[numbers[edge.b]].append(cols[edge.cols])

    domains, node_leaf, representatives = [], [], []
    classes: dict[object, tuple[int, Indices]] = {}
    for table, maps in zip(tables[: len(flat.nodes)], raw_maps, strict=True):
        # Operators with equal costs whose edges distinguish their configurations in the same way share one
        # leaf; this is how identical layers come to share all later tables.
        key2 = (id(table), tuple(m.tobytes() for m in maps))
        if key2 not in classes:
            leaf, representative = _node_leaf(table, maps)
            leaves.append(leaf)
            classes[key2] = len(leaves) - 1, representative
        index, representative = classes[key2]
        domains.append(len(representative))
        node_leaf.append(index)
        representatives.append(representative)

    edges = []
    taken = [0] * len(flat.nodes)
    shared: dict[bytes, Indices] = {}
    for edge, (index, height, width) in zip(graph.edges, edge_leaf, strict=True):
        source, target = numbers[edge.a], numbers[edge.b]
        ends = []
        for end in (source, target):
            # Maps were listed in the order of the edges and are consumed in the same order.
            values = raw_maps[end][taken[end]][representatives[end]]
            taken[end] += 1
            ends.append(shared.setdefault(values.tobytes(), values))
        edges.append(LeafEdge(source, target, index, height, width, ends[0], ends[1]))
    grids = memory_grid, time_grid, memory_error, time_error
    return ReducedGraph(flat, tuple(leaves), tuple(domains), tuple(node_leaf), tuple(edges), *grids)


def restrict(reduced: ReducedGraph, kept: dict[int, NDArray[np.bool_]]) -> ReducedGraph:
    """Return the graph with only those classes of each operator v in ``kept`` that mask ``kept[v]`` marks."""
    leaves = list(reduced.leaves)
    node_leaf, domains = list(reduced.node_leaf), list(reduced.domains)
    made: dict[tuple[int, bytes], int] = {}
    for v, mask in kept.items():
        if mask.all():
            continue
        key = reduced.node_leaf[v], mask.tobytes()
        if key not in made:
            leaves.append(leaves[key[0]].only(mask))
            made[key] = len(leaves) - 1
        node_leaf[v], domains[v] = made[key], int(mask.sum())

    def narrowed(v: int, values: Indices) -> Indices:
        return values[kept[v]] if v in kept else values

    edges = [
        replace(e, rows=narrowed(e.source, e.rows), cols=narrowed(e.target, e.cols)) for e in reduced.edges
    ]
    # Otherwise edge tables, and every step over them, would stay as large as before.
    edges = _without_unused(edges, leaves)
    return replace(
        reduced, leaves=tuple(leaves), node_leaf=tuple(node_leaf), domains=tuple(domains), edges=tuple(edges)
    )


def _without_unused(edges: list[LeafEdge], leaves: list[Leaf]) -> list[LeafEdge]:
    """Cut the input tables (in ``leaves``) of edges down to the rows and columns in use; return the edges."""
    used = {e.leaf: (np.zeros(e.height, bool), np.zeros(e.width, bool)) for e in edges}
    for e in edges:
        rows, cols = used[e.leaf]
        rows[e.rows] = cols[e.cols] = True
    for index, (rows, cols) in used.items():
        if not (rows.all() and cols.all()):
            leaves[index] = leaves[index].only((rows[:, None] & cols[None, :]).reshape(-1))
    ranks = {index: (np.cumsum(rows) - 1, np.cumsum(cols) - 1) for index, (rows, cols) in used.items()}
    shared: dict[bytes, Indices] = {}

    def moved(rank: Indices, values: Indices) -> Indices:
        values = rank[values]
        return shared.setdefault(values.tobytes(), values)

    narrow = []
    for e in edges:
        row, col = ranks[e.leaf]
        height, width = int(row[-1]) + 1, int(col[-1]) + 1
        rows, cols = moved(row, e.rows), moved(col, e.cols)
        narrow.append(replace(e, height=height, width=width, rows=rows, cols=cols))
    return narrow


def impossible(reduced: ReducedGraph) -> str:
    """Return, as text, why every strategy is impossible, as far as arc consistency can tell (Mackworth,
    "Consistency in networks of relations", 1977)."""
    names = reduced.graph.names
    alive = [np.ones(d, bool) for d in reduced.domains]
    changed = True
    while changed:
        changed = False
        for edge in reduced.edges:
            leaf = reduced.leaves[edge.leaf]
            table = (np.diff(leaf.offsets) > 0).reshape(edge.height, edge.width)
            pairs = table[np.ix_(edge.rows, edge.cols)]
            pairs = pairs & alive[edge.source][:, None] & alive[edge.target][None, :]
            for v, supported in ((edge.source, pairs.any(axis=1)), (edge.target, pairs.any(axis=0))):
                if (alive[v] & ~supported).any():
                    alive[v] &= supported
                    changed = True
                if not alive[v].any():
                    return (
                        f"the edge {names[edge.source]!r} -> {names[edge.target]!r} allows none of the "
                        f"configurations that the other edges leave to {names[v]!r}"
                    )
    return "every combination of configurations has an impossible (inf) cost"


def _within(table: FlatTable, caps: Caps) -> FlatTable:
    kept = (table.memory <= caps.memory) & (table.time <= caps.time)
    if kept.all():
        return table
    offsets = np.concatenate([[0], np.cumsum(kept)])[table.offsets].astype(np.int64)
    return FlatTable(table.shape, offsets, table.memory[kept], table.time[kept], table.option[kept])


def _grid(costs: list[Floats], most: float) -> float:
    """Return the power of two to whose multiples costs are rounded, so that sums up to ``most`` are exact."""
    # Sums beyond a cap are impossible anyway, so the grid need not hold them and can be finer.
    total = min(sum(float(c.max()) for c in costs if len(c)), most)
    return 2.0 ** (math.frexp(total)[1] - _GRID_BITS) if total > 0 else 1.0


def _snapped(costs: Floats, grid: float) -> tuple[Floats, float]:
    """Return the costs rounded to multiples of ``grid``, and the most by which one of them changed."""
    snapped = np.rint(costs / grid) * grid
    return snapped, float(np.abs(snapped - costs).max(initial=0.0))


def _edge_leaf(table: FlatTable) -> tuple[Leaf, Indices, Indices]:
    height, width = table.shape
    counts = np.diff(table.offsets)
    options = int(counts.max(initial=1))
    entry = np.repeat(np.arange(height * width), counts)
    slot = np.arange(len(entry)) - table.offsets[entry]
    full = np.full((height * width, options, 3), np.inf)
    # The option is part of what must agree: two rows with equal costs but different options are reported
    # differently to the caller.
    full[entry, slot] = np.stack([table.memory, table.time, table.option], axis=1)
    grid = full.reshape(height, width, -1)
    first_row, rows = _unique(grid.reshape(height, -1))
    grid = grid[first_row]
    first_col, cols = _unique(np.ascontiguousarray(grid.transpose(1, 0, 2)).reshape(width, -1))
    points = np.ascontiguousarray(grid[:, first_col]).reshape(-1, options, 3)
    kept = np.isfinite(points[:, :, 0])
    offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int64)
    flat = points[kept]
    none = np.full(len(flat), -1, np.int64)
    m, t = np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1])
    return Leaf(offsets, m, t, none, flat[:, 2].astype(np.int64)), rows, cols


def _node_leaf(table: FlatTable, maps: list[Indices]) -> tuple[Leaf, Indices]:
    """Return an operator's input table, with an entry per class of possible configurations, and a member of
    each class."""
    counts = np.diff(table.offsets)
    possible = np.flatnonzero(counts)
    signature = np.stack(maps, axis=1)[possible] if maps else np.zeros((len(possible), 1), np.int64)
    first, of_possible = _unique(np.ascontiguousarray(signature))
    class_of = np.full(table.entries, -1, np.int64)
    class_of[possible] = of_possible
    configuration = np.repeat(np.arange(table.entries), counts)
    entry = class_of[configuration]
    option = table.option.astype(np.int64)
    # Of points with equal costs, the first configuration and its first option represent the class.
    order = np.lexsort((option, configuration, table.time, table.memory, entry))
    entry, m, t = entry[order], table.memory[order], table.time[order]
    kept = segmented_staircase(entry, t)
    counts = np.bincount(entry[kept], minlength=len(first))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    leaf = Leaf(offsets, m[kept], t[kept], configuration[order][kept], option[order][kept])
    return leaf, possible[first]


def _unique(rows: NDArray[np.generic]) -> tuple[Indices, Indices]:
    """Return the first index of every distinct row in order of appearance, and the class of each row."""
    # Not np.unique of the rows, which sorts them: classes are numbered in the caller's order, so that ties go
    # to the first.
    classes = numbered(row.tobytes() for row in rows)
    return np.unique(classes, return_index=True)[1], classes


def numbered(keys: Iterable[Hashable]) -> Indices:
    """Return a number for each key, in order of appearance; equal keys have the same number."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
