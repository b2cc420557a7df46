"""Points as the arrays of a file, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.plan.figures import KEPT
from tensoropt.plan.point import Point
from tensoropt.plan.point_table import PointTable
from tensoropt.plan.space import Space

NO_INDICES = (np.empty((1, 0), dtype=int),) * 2
"""Of points that carry their plans."""


def point_arrays(points: Sequence[Point], spaces: Sequence[Space]) -> dict[str, np.ndarray]:
    """The columns of some points, and their indices: per space rows of one length, which a file needs.

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
    for s in range(len(spaces)):
        rows = [row for row in np.flatnonzero(space == s).tolist() if points[row].carried is None]
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
    """The table of the points that :func:`point_arrays` wrote; points themselves are made when asked for.

    Args:
        spaces: how many there are.
        carried: by row the plans of points without indices.

    Raises:
        ValueError: the arrays do not fit together.
    """
    columns = {name: arrays[name] for name in (*KEPT, "planner", "space") if name in arrays}
    count = len(columns["space"])
    if any(column.shape != (count,) for column in columns.values()):
        raise ValueError("columns of different lengths")
    place = np.full(count, -1)
    indices = []
    for s in range(spaces):
        choice, options, rows = arrays[f"choice_{s}"], arrays[f"options_{s}"], arrays[f"rows_{s}"]
        if not len(choice) == len(options) == len(rows) or (columns["space"][rows] != s).any():
            raise ValueError(f"indices of space {s} that do not fit its points")
        place[rows] = np.arange(len(rows))
        indices.append((choice, options))
    place[np.array(list(carried), dtype=int)] = 0
    if (place < 0).any() or not ((columns["space"] >= 0) & (columns["space"] < spaces)).all():
        raise ValueError("points without a strategy")
    sends, kinds, axes = arrays["sends"], arrays["send_kind"], arrays["send_axes"]
    starts = np.searchsorted(sends[:, 0], np.arange(count + 1))

    def collectives(row: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        part = slice(starts[row], starts[row + 1])
        for kind, over, (_, size, times) in zip(kinds[part], axes[part], sends[part].tolist(), strict=True):
            yield str(kind), tuple(int(axis) for axis in over.split(",") if axis), size, times

    def make(row: int) -> Point:
        space = int(columns["space"][row])
        choice, options = indices[space] if row not in carried else NO_INDICES
        told = ((name, columns[name][row]) for name in KEPT if name in columns)
        return Point.of(
            **{name: figure for name, figure in told if not np.isnan(figure)},
            space=space,
            choice=tuple(choice[place[row]].tolist()),
            options=tuple(options[place[row]].tolist()),
            collectives=tuple(collectives(row)),
            planner=str(columns["planner"][row]),
            **carried.get(row, {}),
        )

    unknown = np.full(count, np.nan)

    def read(name: str) -> np.ndarray:
        column = columns.get(name, unknown)
        default = KEPT[name].default if name in KEPT else np.nan
        return column if default != default else np.where(np.isnan(column), default, column)

    return PointTable(count, read, make)


def _packed(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Indices in the smallest integers that hold them."""
    found = np.array(rows, dtype=np.int32).reshape(len(rows), len(rows[0]) if rows else 0)
    return found.astype(np.min_scalar_type(int(found.max(initial=0))))
