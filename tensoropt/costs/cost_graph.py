"""The cost graph on which a search runs: variables, their configurations, and the costs of each choice."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensoropt.ops.layouts import Layout
from tensoropt.types import Floats, Indices

LEAST_COST, MOST_COST = 2.0**-500, 2.0**500
"""The range of nonzero costs and sums, in which products neither overflow nor lose digits."""

NO_OPTION = np.zeros(1, dtype=bool)


@dataclass(frozen=True, eq=False)
class VariableTable:
    """The costs of each configuration of a variable (a choice of the search, such as how a group is split).

    Attributes:
        key: the variable's name; in tables of a model, a :class:`tensoropt.costs.tables.Variable`.
        layouts: the layout of each configuration of a hub (tensor with several readers) or tied parameter.
        kept: for each configuration of a hub, whether the tensor is saved for backward in this layout.
        again: for each configuration of a group or hub, whether it is recomputed; recomputed ones come last.
        options: for each configuration of a group, the stored layouts of its parameters in each option.
        memory, compute, communication: for each configuration, (options,) bytes or seconds.
    """

    key: Any
    memory: tuple[Floats, ...]
    compute: tuple[Floats, ...]
    communication: tuple[Floats, ...]
    layouts: tuple[Layout, ...] = ()
    kept: tuple[bool, ...] = ()
    again: tuple[bool, ...] = ()
    options: tuple[tuple[tuple[Layout, ...], ...], ...] = ()

    @property
    def costs(self) -> list[Floats]:
        return [
            np.stack([m, c + n], axis=1)
            for m, c, n in zip(self.memory, self.compute, self.communication, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """The costs of a pair of variables, ``a`` and ``b``: bytes, and seconds of communication.

    Configurations i of ``a`` and j of ``b`` together cost ``table[rows[i], cols[j]]``, an array (2,), or
    (options, 2) if the pair offers options.
    """

    a: Any
    b: Any
    table: Floats
    rows: Indices
    cols: Indices


def edge_keys(edges: Iterable[EdgeTable]) -> list[tuple[Any, Any, int]]:
    """Return the keys of edges: (source, target, index among the edges between the same two variables)."""
    numbers: dict[object, itertools.count[int]] = defaultdict(itertools.count)
    return [(edge.a, edge.b, next(numbers[edge.a, edge.b])) for edge in edges]


Allowed = Callable[[VariableTable, int], NDArray[np.bool_] | None]
"""(variable, configuration) -> mask over the configuration's options, or None to allow all."""


@dataclass(eq=False, repr=False)
class CostGraph:
    """Variables ("operators" of a search), configurations, and costs in memory (bytes) and time (seconds).

    Impossible choices cost ``inf`` or have an empty list of options. Parallel edges, several components, and
    variables with one configuration are allowed. The search prepares tables that share an array only once.
    """

    variables: list[VariableTable] = field(default_factory=list)
    edges: list[EdgeTable] = field(default_factory=list)
    of: dict[str, VariableTable] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Copies made by replace() must not grow together.
        self.variables, self.edges = list(self.variables), list(self.edges)
        self.of = {variable.key: variable for variable in self.variables}

    def __len__(self) -> int:
        return len(self.variables)

    @property
    def names(self) -> list[str]:
        return list(self.of)

    def restricted(self, allowed: Allowed) -> Self:
        """Return a copy in which options that ``allowed`` masks out cost infinity; ValueError if a mask does
        not have one value per option."""
        # Layers that look alike go on sharing their arrays, and are prepared once by the search.
        shared: dict[object, tuple[Floats, ...]] = {}
        variables = []
        for variable in self.variables:
            masks = [allowed(variable, index) for index in range(len(variable.memory))]
            key = id(variable.memory), *(None if mask is None else mask.tobytes() for mask in masks)
            if key not in shared:
                shared[key] = tuple(
                    memory if mask is None else np.where(mask, memory, np.inf)
                    for memory, mask in zip(variable.memory, masks, strict=True)
                )
            free = all(mask is None for mask in masks)
            variables.append(variable if free else replace(variable, memory=shared[key]))
        return replace(self, variables=variables)

    def add_operator(self, name: str, costs: Any) -> None:
        """Add a variable; ``costs[k]`` is an array (options, 2) of memory and time of configuration ``k``.

        A float array (K, options, 2) is equivalent; (K, 2) means one option each.

        Raises:
            ValueError: repeated name, no configurations, or negative, NaN or ragged costs.
        """
        what = f"operator {name!r}"
        if name in self.of:
            raise ValueError(f"{what} is already in the graph; give every operator its own name")
        try:
            listed = list(costs)
        except TypeError:
            raise ValueError(
                f"{what}: costs must be a list of arrays, one for each configuration, in which every row is "
                "the (memory, time) of one option"
            ) from None
        entries = [_options(entry, f"{what}, configuration {i}") for i, entry in enumerate(listed)]
        if not entries:
            raise ValueError(f"{what} has no configurations; give it at least one")
        check_costs(np.concatenate(entries), what)
        memory, time = (tuple(entry[:, column] for entry in entries) for column in (0, 1))
        variable = VariableTable(name, memory, time, tuple(map(np.zeros_like, time)))
        self.variables.append(variable)
        self.of[name] = variable

    def add_edge(
        self,
        source: str,
        target: str,
        costs: Any,
        rows: ArrayLike | None = None,
        cols: ArrayLike | None = None,
    ) -> None:
        """Add an edge; ``costs[i][j]`` is an array (options, 2) of memory and time of configurations (i, j).

        A float array (Ka, Kb, options, 2) is equivalent; (Ka, Kb, 2) means one option each. With ``rows``
        (Ka,) and ``cols`` (Kb,), configurations (i, j) cost ``costs[rows[i]][cols[j]]``.

        Raises:
            ValueError: unknown ends, a self-edge, a wrong shape, or negative, NaN or ragged costs.
        """
        what = f"edge {source!r} -> {target!r}"
        for end in (source, target):
            if end not in self.of:
                raise ValueError(f"{what}: {end!r} is not in the graph; add the operator before its edges")
        if source == target:
            raise ValueError(f"{what} joins an operator with itself; add its cost to the operator instead")
        table = _dense(costs, what) if _is_dense(costs) else _padded(costs, what)
        check_costs(table, what)
        maps = [
            _class_map(given, len(self.of[end].memory), size, f"{what}: {side}")
            for side, end, size, given in zip(
                ("rows", "cols"), (source, target), table.shape[:2], (rows, cols), strict=True
            )
        ]
        self.edges.append(EdgeTable(source, target, table, *maps))


def check_costs(points: Floats, what: str) -> None:
    """Raise a ValueError that begins with ``what`` if a cost is NaN, negative, too small or too large."""
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


def _class_map(given: ArrayLike | None, configurations: int, size: int, what: str) -> Indices:
    if given is None:
        if configurations != size:
            raise ValueError(
                f"{what}: the table has {size} entries along this side and the operator has {configurations} "
                "configurations; make both equal, or pass the index of the entry that each configuration uses"
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
            f"{what} has values from {values.min()} to {values.max()}, but the table has {size} entries "
            f"along this side; use 0 to {size - 1}"
        )
    return values.astype(np.int64)


def _is_dense(costs: Any) -> bool:
    return isinstance(costs, np.ndarray) and costs.dtype.kind in "fiu" and costs.ndim in (3, 4)


def _dense(costs: NDArray[Any], what: str) -> Floats:
    values = np.asarray(costs, dtype=np.float64)
    if values.shape[-1] != 2:
        raise ValueError(f"{what}: the last dimension must be (memory, time); got shape {values.shape}")
    return values if values.ndim == 4 else values[..., None, :]


def _padded(costs: Any, what: str) -> Floats:
    try:
        rows: Sequence[Any] = [list(row) for row in costs]
    except TypeError:
        raise ValueError(f"{what}: costs must be a table of rows, with arrays (options, 2)") from None
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(
            f"{what}: the rows are ragged, with {sorted(widths)} entries; make them equally long"
        )
    entries = [
        [_options(entry, f"{what}, entry ({i}, {j})") for j, entry in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    most = max((len(entry) for row in entries for entry in row), default=0)
    table = np.full((len(rows), widths.pop() if widths else 0, most, 2), np.inf)
    for i, row in enumerate(entries):
        for j, entry in enumerate(row):
            table[i, j, : len(entry)] = entry
    return table


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
            f"{what}: expected an array (options, 2) of (memory, time); got shape {points.shape}"
        )
    return points
