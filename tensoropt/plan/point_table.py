"""Points as a table: a column for every figure, from which single points are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

from tensoropt.plan.figures import KEPT
from tensoropt.plan.point import Point


class PointTable(Sequence[Point]):
    """Points in order, and each of their figures as a column.

    Args:
        count: how many there are.
        read: gives the column of a name: one of :data:`~tensoropt.plan.figures.KEPT`, ``space`` or
            ``planner``.
        make: gives a point by its row.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, read: Callable[[str], np.ndarray], make: Callable[[int], Point]):
        self._read, self._make = read, make
        self._points: list[Point | None] = [None] * count
        self._columns: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, points: Sequence[Point]) -> PointTable:
        """The table of some points; one that is given is returned as it is."""
        if isinstance(points, PointTable):
            return points

        def read(name: str) -> np.ndarray:
            if name in KEPT:
                default = KEPT[name].default
                return np.array([point.figures.get(name, default) for point in points], dtype=float)
            kind = str if name == "planner" else int
            return np.array([getattr(point, name) for point in points], dtype=kind)

        return cls(len(points), read, points.__getitem__)

    def column(self, name: str) -> np.ndarray:
        """A figure of all points, NaN where it is unknown; ``space`` and ``planner`` likewise."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def rows(self, wanted: np.ndarray) -> PointTable:
        """The table of some rows, given as their numbers."""
        return PointTable(
            len(wanted), lambda name: self.column(name)[wanted], lambda row: self[int(wanted[row])]
        )

    def joined(self, other: PointTable) -> PointTable:
        """The table of these points and then those of another one."""
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
