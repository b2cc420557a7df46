"""The input of the search: operators with configurations, and costs on operators and edges."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensoropt.frontier.algebra import segmented_staircase
from tensoropt.types import Floats, Indices

LEAST_COST, MOST_COST = 2.0**-500, 2.0**500
"""Nonzero costs, and their sums, must lie between these, so that slopes and products of two costs are floats
that neither overflow nor lose digits."""


@dataclass(frozen=True, eq=False, slots=True)
class CostTable:
    """Small frontiers in one flat table: entry ``e`` holds the points ``offsets[e]:offsets[e + 1]``.

    ``shape``: (K,) for an operator, (P, Q) for an edge, with entries in row-major order. ``memory``, ``time``
    (points,) are finite; ``option`` (points,) int32 is the caller's option index of each point. Every entry
    is reduced: memory strictly ascending, time strictly descending. An entry without points is impossible.
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
class _Edge:
    """The costs between two operators; configurations (i, j) have the cost of entry (rows[i], cols[j]) of
    ``table``.

    ``ordinal``: this is the n-th edge added from ``source`` to ``target``, counted from 0.
    """

    source: int
    target: int
    ordinal: int
    table: CostTable
    rows: Indices
    cols: Indices


class CostGraph:
    """Operators, their configurations, and the cost of each choice in memory (bytes) and time (seconds).

    ``inf`` marks the impossible; an empty list of options is an impossible configuration. Parallel edges (in
    either direction), several components, and operators with one configuration are allowed. Tables with equal
    content are stored once, so identical layers cost nothing.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.nodes: list[CostTable] = []
        self.edges: list[_Edge] = []
        self._index: dict[str, int] = {}
        self._ordinals: dict[tuple[int, int], int] = {}
        self._tables: dict[bytes, CostTable] = {}
        self._known: set[int] = set()
        self._maps: dict[bytes, Indices] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        configurations = sum(t.entries for t in self.nodes)
        return (
            f"CostGraph({len(self.names)} operators, {configurations} configurations, "
            f"{len(self.edges)} edges)"
        )

    def add_operator(self, name: str, costs: Any) -> None:
        """Add an operator; ``costs[k]`` is an array (options, 2) of memory and time of configuration ``k``.

        A float array (K, options, 2) is equivalent; (K, 2) means one option each; the result of
        :func:`operator_costs` for either may be passed any number of times. Raises ``ValueError`` naming the
        operator for a repeated name, no configurations, or negative, NaN or ragged costs.
        """
        what = f"operator {name!r}"
        if name in self._index:
            raise ValueError(f"{what} is already in the graph; give every operator its own name")
        table = self._shared(_table(costs, 1, what))
        if table.entries == 0:
            raise ValueError(f"{what} has no configurations; give it at least one")
        self._index[name] = len(self.names)
        self.names.append(name)
        self.nodes.append(table)

    def add_edge(
        self,
        source: str,
        target: str,
        costs: Any,
        rows: ArrayLike | None = None,
        cols: ArrayLike | None = None,
    ) -> None:
        """Add an edge; ``costs[i][j]`` is an array (options, 2), or ``costs`` is (Ka, Kb, 2) or (Ka, Kb,
        options, 2).

        With ``rows`` (Ka,) and ``cols`` (Kb,) the edge is factored: configurations (i, j) cost
        ``costs[rows[i]][cols[j]]``. The result of :func:`edge_costs` for ``costs`` may be passed any number
        of times. Parallel edges stay separate. Raises ``ValueError`` naming the edge for unknown ends, a
        self-edge, a wrong shape, negative, NaN or ragged costs.
        """
        what = f"edge {source!r} -> {target!r}"
        for end in (source, target):
            if end not in self._index:
                raise ValueError(f"{what}: {end!r} is not in the graph; add the operator before its edges")
        if source == target:
            raise ValueError(f"{what} joins an operator with itself; add its cost to the operator instead")
        a, b = self._index[source], self._index[target]
        table = self._shared(_table(costs, 2, what))
        maps = []
        for side, v, size, given in (("rows", a, table.shape[0], rows), ("cols", b, table.shape[1], cols)):
            maps.append(self._shared_map(_class_map(given, self.nodes[v].entries, size, f"{what}: {side}")))
        ordinal = self._ordinals.get((a, b), 0)
        self._ordinals[a, b] = ordinal + 1
        self.edges.append(_Edge(a, b, ordinal, table, maps[0], maps[1]))

    def blocked(self) -> str | None:
        """The first operator or edge that alone makes every strategy impossible, in words; None if there is
        none."""
        for name, table in zip(self.names, self.nodes, strict=True):
            if len(table.memory) == 0:
                return (
                    f"operator {name!r} has {table.entries} configurations and all are impossible (inf or "
                    "without options)"
                )
        open_: set[tuple[int, int, int]] = set()
        for edge in self.edges:
            key = id(edge.table), id(edge.rows), id(edge.cols)
            # Layers that are alike share tables and maps, and each is examined once.
            if key in open_:
                continue
            possible = (np.diff(edge.table.offsets) > 0).reshape(edge.table.shape)
            if not possible[np.ix_(edge.rows, edge.cols)].any():
                ends = f"{self.names[edge.source]!r} -> {self.names[edge.target]!r}"
                return f"edge {ends} allows no pair of configurations"
            open_.add(key)
        return None

    def check_sums(self) -> None:
        """Raise ``ValueError`` if the costs of a strategy could add up to more than the search can hold."""
        tables = [*self.nodes, *(edge.table for edge in self.edges)]
        for what in ("memory", "time"):
            # The largest cost in every table: no strategy can cost more, though perhaps none costs as much.
            largest = [float(getattr(table, what).max(initial=0.0)) for table in tables]
            if sum(largest) > MOST_COST:
                raise ValueError(
                    f"the costs in {what} of {len(tables)} operators and edges can add up to "
                    f"{sum(largest):.3g}; sums must stay below {MOST_COST:.3g}; give {what} in a larger unit"
                )

    def _shared(self, table: CostTable) -> CostTable:
        # Equal tables become one object, so that later stages compare tables by identity: reduce_graph snaps
        # each table once, and equal steps of a program are recognised in this way.
        if id(table) in self._known:
            return table
        digest = hashlib.blake2b(repr(table.shape).encode(), digest_size=16)
        for array in (table.offsets, table.memory, table.time, table.option):
            digest.update(array.tobytes())
        shared = self._tables.setdefault(digest.digest(), table)
        self._known.add(id(shared))  # the id stays valid, because the table is kept
        return shared

    def _shared_map(self, values: Indices) -> Indices:
        return self._maps.setdefault(values.tobytes(), values)


def operator_costs(costs: Any, what: str) -> CostTable:
    """Prepare the costs that ``add_operator`` takes, once for many operators; ``what`` describes them in
    errors.

    Raises:
        ValueError: negative, NaN or ragged costs.
    """
    return _table(costs, 1, what)


def edge_costs(costs: Any, what: str) -> CostTable:
    """Prepare the costs that ``add_edge`` takes, once for many edges; ``what`` describes them in errors.

    Raises:
        ValueError: negative, NaN or ragged costs.
    """
    return _table(costs, 2, what)


def _class_map(given: ArrayLike | None, configurations: int, size: int, what: str) -> Indices:
    if given is None:
        if configurations != size:
            raise ValueError(
                f"{what}: the table has {size} entries along this side and the operator has {configurations} "
                "configurations; make them equal or say which entry each configuration uses"
            )
        return np.arange(size, dtype=np.int64)
    values = np.asarray(given)
    if values.shape != (configurations,) or values.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be {configurations} integers, one per configuration; got shape {values.shape} of "
            f"{values.dtype}"
        )
    if len(values) and (values.min() < 0 or values.max() >= size):
        raise ValueError(
            f"{what} has values from {values.min()} to {values.max()}, but the table has {size} "
            f"entries along this "
            f"side; use 0 to {size - 1}"
        )
    return values.astype(np.int64)


def _table(costs: Any, dims: int, what: str) -> CostTable:
    if isinstance(costs, CostTable):
        if len(costs.shape) != dims:
            raise ValueError(f"{what}: the table has {len(costs.shape)} dimensions; it needs {dims}")
        return costs
    if isinstance(costs, np.ndarray) and costs.dtype.kind in "fiu" and costs.ndim in (dims + 1, dims + 2):
        return _dense_table(costs, dims, what)
    if dims == 2:
        try:
            rows: Sequence[Any] = [list(row) for row in costs]
        except TypeError:
            raise ValueError(f"{what}: costs must be a table of rows, each a list of entries") from None
        widths = {len(row) for row in rows}
        if len(widths) > 1:
            raise ValueError(
                f"{what}: the rows are ragged, with {sorted(widths)} entries; make them equally long"
            )
        entries = [entry for row in rows for entry in row]
        shape: tuple[int, ...] = (len(rows), widths.pop() if widths else 0)
        names = [
            f"{what}, entry ({i // max(shape[1], 1)}, {i % max(shape[1], 1)})" for i in range(len(entries))
        ]
    else:
        try:
            entries = list(costs)
        except TypeError:
            raise ValueError(
                f"{what}: costs must be a list with one array (options, 2) per configuration"
            ) from None
        shape = (len(entries),)
        names = [f"{what}, configuration {i}" for i in range(len(entries))]
    return _ragged_table([_options(e, n) for e, n in zip(entries, names, strict=True)], shape, what)


def _options(entry: Any, what: str) -> Floats:
    try:
        points = np.asarray(entry, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{what}: the options are ragged or not numbers; give an array (options, 2)"
        ) from None
    if points.size == 0:
        return np.empty((0, 2))
    if points.shape == (2,):
        return points[None]
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(
            f"{what}: expected an array (options, 2) of memory and time; got shape {points.shape}"
        )
    return points


def _check(points: Floats, what: str) -> None:
    if np.isnan(points).any():
        raise ValueError(f"{what}: a cost is NaN; use inf for what is impossible")
    if (points < 0).any():
        raise ValueError(f"{what}: the cost {points[points < 0].flat[0]:g} is negative; costs are at least 0")
    beyond = np.isfinite(points) & (points != 0) & ((points < LEAST_COST) | (points > MOST_COST))
    if beyond.any():
        raise ValueError(
            f"{what}: the cost {points[beyond].flat[0]:.3g} is neither 0 nor between {LEAST_COST:.3g} and "
            f"{MOST_COST:.3g}; use another unit, or inf for what is impossible"
        )


def _dense_table(costs: NDArray[Any], dims: int, what: str) -> CostTable:
    values = np.asarray(costs, dtype=np.float64)
    if values.shape[-1] != 2:
        raise ValueError(f"{what}: the last dimension must be (memory, time); got shape {values.shape}")
    _check(values, what)
    shape = values.shape[:dims]
    points = values.reshape(int(np.prod(shape)), int(np.prod(values.shape[dims:-1])), 2)
    entry = np.repeat(np.arange(len(points)), points.shape[1])
    option = np.tile(np.arange(points.shape[1]), len(points))
    return _reduced(entry, option, points.reshape(-1, 2), shape)


def _ragged_table(entries: list[Floats], shape: tuple[int, ...], what: str) -> CostTable:
    sizes = [len(e) for e in entries]
    points = np.concatenate([*entries, np.empty((0, 2))])
    _check(points, what)
    entry = np.repeat(np.arange(len(entries)), sizes)
    option = np.concatenate([*(np.arange(n) for n in sizes), np.empty(0, np.int64)])
    return _reduced(entry, option, points, shape)


def _reduced(entry: Indices, option: Indices, points: Floats, shape: tuple[int, ...]) -> CostTable:
    """Reduce every entry of a flat table at once, with one sort and one segmented running minimum."""
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
    return CostTable(tuple(shape), offsets, memory, time, option.astype(np.int32))
