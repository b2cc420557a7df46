"""The costs of a graph's operators and edges as flat arrays, without beaten options or repeated tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tensoropt.costs.cost_graph import MOST_COST, CostGraph, EdgeTable, VariableTable, check_costs
from tensoropt.frontier.tools import segmented_staircase
from tensoropt.types import Floats, Indices


@dataclass(frozen=True, eq=False, slots=True)
class FlatTable:
    """The costs of one operator or edge: entry ``e`` has the points ``offsets[e]:offsets[e + 1]``.

    ``shape`` is (K,) for an operator with K configurations, (P, Q) for an edge, with entries in row-major
    order. ``memory``, ``time`` (points,) are finite; ``option`` (points,) int32 is the caller's option index.
    The points of an entry are a frontier: memory strictly ascends, time strictly descends. An entry without
    points is impossible.
    """

    shape: tuple[int, ...]
    offsets: Indices
    memory: Floats
    time: Floats
    option: NDArray[np.int32]

    @property
    def entries(self) -> int:
        """The number of entries, including impossible ones."""
        return len(self.offsets) - 1


@dataclass(frozen=True, eq=False, slots=True)
class FlatTables:
    """The flat tables of a graph's operators and edges, in the graph's order.

    Equal tables are one object, so that later stages compare tables by identity and process each only once.
    """

    graph: CostGraph
    nodes: list[FlatTable]
    edges: list[FlatTable]

    @classmethod
    def of(cls, graph: CostGraph) -> FlatTables:
        """Return the tables of a graph; ``ValueError`` for costs that are negative or NaN."""
        of_array: dict[int, FlatTable] = {}
        of_content: dict[bytes, FlatTable] = {}

        def shared(costs: object, make: Callable[[], FlatTable]) -> FlatTable:
            # Layers that look alike share the arrays themselves, and each of these is reduced once.
            if id(costs) not in of_array:
                table = make()
                of_array[id(costs)] = of_content.setdefault(_digest(table), table)
            return of_array[id(costs)]

        nodes = [shared(v.memory, partial(_node_table, v)) for v in graph.variables]
        edges = [shared(e.table, partial(_edge_table, e)) for e in graph.edges]
        return cls(graph, nodes, edges)

    def blocked(self) -> str | None:
        """Return, as text, which operator or edge alone makes every strategy impossible, or None."""
        for name, table in zip(self.graph.names, self.nodes, strict=True):
            if len(table.memory) == 0:
                return (
                    f"operator {name!r} has {table.entries} configurations and all are impossible (inf or "
                    "without options)"
                )
        possible: set[object] = set()
        for edge, table in zip(self.graph.edges, self.edges, strict=True):
            key = id(table), edge.rows.tobytes(), edge.cols.tobytes()
            # Layers that are alike share tables and maps, and each is examined once.
            if key in possible:
                continue
            pairs = (np.diff(table.offsets) > 0).reshape(table.shape)
            if not pairs[np.ix_(edge.rows, edge.cols)].any():
                return f"edge {edge.a!r} -> {edge.b!r} allows no pair of configurations"
            possible.add(key)
        return None

    def check_sums(self) -> None:
        """Raise ``ValueError`` if the costs of a strategy could add up to more than ``MOST_COST``."""
        tables = [*self.nodes, *self.edges]
        for cost in ("memory", "time"):
            # The largest cost in every table: no strategy can cost more, though perhaps none costs as much.
            largest = [float(getattr(table, cost).max(initial=0.0)) for table in tables]
            if sum(largest) > MOST_COST:
                raise ValueError(
                    f"the costs in {cost} of {len(tables)} operators and edges can add up to "
                    f"{sum(largest):.3g}; sums must stay below {MOST_COST:.3g}; give {cost} in a larger unit"
                )


def _digest(table: FlatTable) -> bytes:
    digest = hashlib.blake2b(repr(table.shape).encode(), digest_size=16)
    for array in (table.offsets, table.memory, table.time, table.option):
        digest.update(array.tobytes())
    return digest.digest()


def _node_table(variable: VariableTable) -> FlatTable:
    memory, compute, communication = map(
        np.concatenate, (variable.memory, variable.compute, variable.communication)
    )
    points = np.stack([memory, compute + communication], axis=1)
    check_costs(points, f"operator {variable.key!r}")
    sizes = [len(options) for options in variable.memory]
    entry = np.repeat(np.arange(len(sizes)), sizes)
    return _reduced(entry, np.concatenate([*map(np.arange, sizes)]), points, (len(sizes),))


def _edge_table(edge: EdgeTable) -> FlatTable:
    check_costs(edge.table, f"edge {edge.a!r} -> {edge.b!r}")
    shape = edge.table.shape[:2]
    entries = shape[0] * shape[1]
    options = edge.table.shape[2] if edge.table.ndim == 4 else 1
    entry = np.repeat(np.arange(entries), options)
    option = np.tile(np.arange(options), entries)
    return _reduced(entry, option, edge.table.reshape(-1, 2), shape)


def _reduced(entry: Indices, option: Indices, points: Floats, shape: tuple[int, ...]) -> FlatTable:
    finite = np.isfinite(points).all(axis=1)
    entry, option, points = entry[finite], option[finite], points[finite]
    entries = int(np.prod(shape))
    counts = np.bincount(entry, minlength=entries)
    # Tables with one option per entry are already reduced and in the order of their entries.
    if len(counts) and counts.max() > 1:
        # By entry, then memory, then time, then option: of equal options the first is kept.
        order = np.lexsort((option, points[:, 1], points[:, 0], entry))
        entry, option, points = entry[order], option[order], points[order]
        kept = segmented_staircase(entry, points[:, 1])
        entry, option, points = entry[kept], option[kept], points[kept]
        counts = np.bincount(entry, minlength=entries)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    memory, time = np.ascontiguousarray(points[:, 0]), np.ascontiguousarray(points[:, 1])
    return FlatTable(tuple(shape), offsets, memory, time, option.astype(np.int32))
