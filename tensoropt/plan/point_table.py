"""Points as a table with a column for every figure; single points are made on demand.

The table is stored as the arrays of a file, and read back from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, SupportsIndex, overload

import numpy as np

from tensoropt.plan.figures import FLAG, KEPT
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.point_records import record_of
from tensoropt.plan.space import Space

SENT = "sent"
"""The column of what points send: of each the kinds of collectives with their mesh axes, each once."""


class PointTable(Sequence[Point]):
    """Points in order, and each of their figures as a column.

    Args:
        count: the number of points.
        read: returns the column with a name: one of :data:`~tensoropt.plan.figures.KEPT`, ``space`` or
            ``planner``.
        make: returns a point by its row.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, read: Callable[[str], np.ndarray], make: Callable[[int], Point]):
        self._read, self._make = read, make
        self._points: list[Point | None] = [None] * count
        self._columns: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, points: Sequence[Point]) -> PointTable:
        """Return the table of some points; a table is returned unchanged."""
        if isinstance(points, PointTable):
            return points

        def read(name: str) -> np.ndarray:
            if name in KEPT:
                default = KEPT[name].default
                return np.array([point.figures.get(name, default) for point in points], dtype=float)
            if name == SENT:
                sent = [
                    tuple(dict.fromkeys((kind, axes) for kind, axes, *_ in p.collectives)) for p in points
                ]
                return _objects(sent)
            kind = str if name == "planner" else int
            return np.array([getattr(point, name) for point in points], dtype=kind)

        return cls(len(points), read, points.__getitem__)

    def column(self, name: str) -> np.ndarray:
        """Return a figure of all points, NaN if it is unknown; ``space``, ``planner`` and :data:`SENT`
        likewise."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    @property
    def memory(self) -> np.ndarray:
        """The bytes per device of all points; with :attr:`time`, the input of the frontier tools."""
        return self.column("memory_bytes")

    @property
    def time(self) -> np.ndarray:
        """The seconds per step of all points."""
        return self.column("time_s")

    def rows(self, wanted: np.ndarray) -> PointTable:
        """Return the table of the rows with these numbers."""
        return PointTable(
            len(wanted), lambda name: self.column(name)[wanted], lambda row: self[int(wanted[row])]
        )

    def joined(self, other: PointTable) -> PointTable:
        """Return the table of these points, followed by those of another table."""
        if not len(other):
            return self
        own = len(self)
        return PointTable(
            own + len(other),
            lambda name: np.concatenate([self.column(name), other.column(name)]),
            lambda row: self[row] if row < own else other[row - own],
        )

    def __len__(self) -> int:
        return len(self._points)

    @overload
    def __getitem__(self, row: SupportsIndex) -> Point: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Point, ...]: ...
    def __getitem__(self, row: SupportsIndex | slice) -> Point | tuple[Point, ...]:
        if isinstance(row, slice):
            return tuple(self[i] for i in range(*row.indices(len(self))))
        at = range(len(self))[row]
        point = self._points[at]
        if point is None:
            point = self._points[at] = self._make(at)
        return point

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return PointTable.of, (tuple(self),)


def point_arrays(points: Sequence[Point], spaces: Sequence[Space]) -> dict[str, np.ndarray]:
    """Return the columns of some points, and their indices; the indices of a space are rows of one length,
    which a file needs.

    ``space``, ``planner``, ``devices`` and ``micro_batches`` are columns, too. ``sends`` has (row, bytes,
    count) of each collective, of which ``send_kind`` and ``send_axes`` are the words.
    """
    table = PointTable.of(points)
    space = table.column("space")
    arrays = {"planner": table.column("planner"), "space": space}
    for name in KEPT:
        # NaN also for a figure with a default, so that a point has again what it was made with.
        column = np.array([point.figures.get(name, np.nan) for point in points], dtype=float)
        if not np.isnan(column).all():
            arrays[name] = column
    arrays["devices"] = np.array([s.devices for s in spaces], dtype=np.int32)[space]
    arrays["micro_batches"] = np.array([s.micro_batches for s in spaces], dtype=np.int32)[space]
    of_spaces, _ = by_strategy(points)
    for s in range(len(spaces)):
        rows = of_spaces.get(s, [])
        # Per space, as points of different spaces have different numbers of variables.
        arrays[f"rows_{s}"] = np.array(rows, dtype=np.int32)
        arrays[f"choice_{s}"] = _packed([points[row].choice for row in rows])
        arrays[f"options_{s}"] = _packed([points[row].options for row in rows])
    sends = [(row, *send) for row, point in enumerate(points) for send in point.collectives]
    numbers = [(row, size, times) for row, _, _, size, times in sends]
    arrays["sends"] = np.array(numbers, dtype=np.int64).reshape(-1, 3)
    arrays["send_kind"] = np.array([kind for _, kind, *_ in sends], dtype=str)
    arrays["send_axes"] = np.array([",".join(map(str, axes)) for _, _, axes, *_ in sends], dtype=str)
    return arrays


def read_points(
    arrays: Mapping[str, np.ndarray], spaces: int, carried: Mapping[int, Mapping[str, Any]]
) -> PointTable:
    """Return the table of the points that :func:`point_arrays` wrote; single points are made on demand.

    Args:
        spaces: the number of spaces.
        carried: the plans of points without indices, by row.

    Raises:
        ValueError: the arrays do not fit together.
    """
    stored = _StoredPoints(arrays, spaces, carried)
    return PointTable(len(stored.space), stored.column, stored.point)


def read_figures(arrays: Mapping[str, np.ndarray]) -> PointTable:
    """Return the same table with columns alone: points cannot be made without their strategies."""
    stored = _StoredFigures(arrays)
    return PointTable(len(stored.space), stored.column, stored.point)


class _StoredFigures:
    """The columns of stored points."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.space, self.planner = arrays["space"], arrays["planner"]
        self.figures = {name: arrays[name] for name in KEPT if name in arrays}
        self.sends, self.kinds, self.axes = arrays["sends"], arrays["send_kind"], arrays["send_axes"]
        for column in (self.planner, *self.figures.values()):
            if column.shape != self.space.shape:
                raise ValueError("columns of different lengths")
        if any(column.dtype.kind != "f" for column in self.figures.values()):
            raise ValueError("figures that are no numbers")

    def column(self, name: str) -> np.ndarray:
        """Return a column of the table."""
        if name == SENT:
            return self._sent
        if name not in KEPT:
            return self.space if name == "space" else self.planner
        column = self.figures.get(name, np.full(len(self.space), np.nan))
        default = KEPT[name].default
        return column if default != default else np.where(np.isnan(column), default, column)

    def point(self, row: int) -> Point:
        """Raise :class:`TypeError`."""
        raise TypeError(f"point {row} has no strategy: only figures were read")

    @cached_property
    def _sent(self) -> np.ndarray:
        pairs = np.stack([self.kinds, self.axes]) if len(self.kinds) else np.zeros((2, 0), dtype=str)
        words, which = np.unique(pairs, axis=1, return_inverse=True)
        sends = np.zeros((len(self.space), words.shape[1]), dtype=bool)
        sends[self.sends[:, 0], which.reshape(-1)] = True
        known = [(str(kind), tuple(map(int, filter(None, axes.split(","))))) for kind, axes in words.T]
        patterns, of_row = np.unique(sends, axis=0, return_inverse=True)
        used = [tuple(one for one, is_sent in zip(known, row, strict=True) if is_sent) for row in patterns]
        return _objects(used)[of_row.reshape(-1)]


class _StoredPoints(_StoredFigures):
    """The arrays of stored points; what all points share is built when the first point is made."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], spaces: int, carried: Mapping[int, Mapping[str, Any]]
    ):
        super().__init__(arrays)
        self.carried, self.place = carried, np.full(len(self.space), -1)
        self.indices = []
        for s in range(spaces):
            choice, options, rows = arrays[f"choice_{s}"], arrays[f"options_{s}"], arrays[f"rows_{s}"]
            # Behind the options of variables are those of tensors that may be gathered again.
            alike = {len(choice), len(options)} == {len(rows)} and choice.shape[1] <= options.shape[1]
            if not alike or (self.space[rows] != s).any():
                raise ValueError(f"indices of space {s} that do not fit its points")
            self.place[rows] = np.arange(len(rows))
            self.indices.append((choice, options))
        self.place[np.array(list(carried), dtype=int)] = 0
        if (self.place < 0).any() or not ((self.space >= 0) & (self.space < spaces)).all():
            raise ValueError("points without a strategy")

    def point(self, row: int) -> Point:
        """Return a point with its strategy."""
        found = {name: values[row] for name, values in self._values if values[row] == values[row]}
        choice: tuple[int, ...] = ()
        options: tuple[int, ...] = ()
        if row not in self.carried:
            chosen, stored = self.indices[self.space[row]]
            choice, options = (tuple(one[self.place[row]].tolist()) for one in (chosen, stored))
        return Point(
            figures=found,
            space=int(self.space[row]),
            choice=choice,
            options=options,
            collectives=tuple(self._collectives[self._starts[row] : self._starts[row + 1]]),
            planner=str(self.planner[row]),
            record=record_of(self.carried.get(row, {})),
        )

    @cached_property
    def _values(self) -> list[tuple[str, list[Any]]]:
        """The figures as Python numbers, with flags as bools."""
        return [
            (name, (column == 1.0 if KEPT[name].unit is FLAG else column).tolist())
            for name, column in self.figures.items()
        ]

    @cached_property
    def _collectives(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        over = {words: tuple(map(int, filter(None, words.split(",")))) for words in set(self.axes.tolist())}
        rows = zip(self.kinds.tolist(), self.axes.tolist(), self.sends.tolist(), strict=True)
        return [(kind, over[axes], size, times) for kind, axes, (_, size, times) in rows]

    @cached_property
    def _starts(self) -> list[int]:
        return list(np.searchsorted(self.sends[:, 0], np.arange(len(self.space) + 1)).tolist())


def _objects(values: Sequence[object]) -> np.ndarray:
    """Return an array of values that are sequences themselves."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _packed(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return indices in the smallest integer type that holds them."""
    found = np.array(rows, dtype=np.int32).reshape(len(rows), len(rows[0]) if rows else 0)
    return found.astype(np.min_scalar_type(int(found.max(initial=0))))
