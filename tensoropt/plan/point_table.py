"""The points of an exploration as a table, and as arrays for a file with one column per figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tensoropt.plan.figures import FLAG, KEPT
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.point_records import WITH_INDICES, StagesRecord
from tensoropt.plan.space import Space

_Strategy = tuple[tuple[int, ...], tuple[int, ...]]
"""The choice and options of a point, as indices."""


class PointTable(tuple[Point, ...]):
    """A sequence of points, with memory and time as arrays that are computed once."""

    @cached_property
    def memory(self) -> np.ndarray:
        """(points,) the memory per device in bytes."""
        return np.array([point.memory_bytes for point in self], dtype=float)

    @cached_property
    def time(self) -> np.ndarray:
        """(points,) the duration of a step in seconds."""
        return np.array([point.time_s for point in self], dtype=float)

    @cached_property
    def planners(self) -> tuple[str, ...]:
        """The name of each point's planner."""
        return tuple(point.planner for point in self)


def point_arrays(points: Sequence[Point], spaces: Sequence[Space]) -> dict[str, np.ndarray]:
    """Return points as one array per figure, and their choices as arrays of indices, for each searched mesh.

    ``space``, ``planner``, ``devices`` and ``micro_batches`` are columns, too. ``sends`` has (row of the
    point, bytes, count) of each collective, ``send_kind`` and ``send_axes`` its kind and axes.
    """
    space = np.array([point.space for point in points], dtype=int)
    arrays = {"planner": np.array([point.planner for point in points], dtype=str), "space": space}
    for name in KEPT:
        # NaN even for figures with a default, so that a point is read back as it was made.
        column = np.array([point.figures.get(name, np.nan) for point in points], dtype=float)
        if not np.isnan(column).all():
            arrays[name] = column
    arrays["devices"] = np.array([s.devices for s in spaces], dtype=np.int32)[space]
    arrays["micro_batches"] = np.array([s.micro_batches for s in spaces], dtype=np.int32)[space]
    of_spaces, _ = by_strategy(points)
    for s in range(len(spaces)):
        rows = of_spaces.get(s, [])
        # Per space, as the number of variables differs between spaces.
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
) -> tuple[Point, ...]:
    """Return the points that :func:`point_arrays` wrote.

    Args:
        spaces: the number of searched meshes with a micro-batch count.
        carried: the plans of placed and pipelined points, by row.

    Raises:
        ValueError: the arrays contradict each other.
    """
    space, planner = arrays["space"], arrays["planner"]
    columns = {name: arrays[name] for name in KEPT if name in arrays}
    if any(column.shape != space.shape for column in (planner, *columns.values())):
        raise ValueError("columns of different lengths")
    if any(column.dtype.kind != "f" for column in columns.values()):
        raise ValueError("figures that are not numbers")
    # As Python numbers; flags as bools.
    values = [
        (name, (column == 1.0 if KEPT[name].unit is FLAG else column).tolist())
        for name, column in columns.items()
    ]
    over = {
        words: tuple(map(int, filter(None, words.split(",")))) for words in set(arrays["send_axes"].tolist())
    }
    sends: list[list[tuple[str, tuple[int, ...], int, int]]] = [[] for _ in space]
    sent = (arrays[name].tolist() for name in ("send_kind", "send_axes", "sends"))
    for kind, axes, (row, size, times) in zip(*sent, strict=True):
        sends[row].append((kind, over[axes], size, times))
    strategies: dict[int, _Strategy] = dict.fromkeys(carried, ((), ()))
    for s in range(spaces):
        strategies |= _strategies(s, arrays)
    if len(strategies) != len(space):
        raise ValueError("points without a strategy")
    return tuple(
        Point(
            figures={name: of[row] for name, of in values if of[row] == of[row]},
            space=of_space,
            choice=strategies[row][0],
            options=strategies[row][1],
            collectives=tuple(sends[row]),
            planner=by,
            record=StagesRecord.from_data(carried[row]["record"]) if row in carried else WITH_INDICES,
        )
        for row, (of_space, by) in enumerate(zip(space.tolist(), planner.tolist(), strict=True))
    )


def _strategies(space: int, arrays: Mapping[str, np.ndarray]) -> dict[int, _Strategy]:
    rows, *indices = (arrays[f"{name}_{space}"] for name in ("rows", "choice", "options"))
    choice, options = indices
    # Options of variables come first, then those of regathered tensors.
    alike = {len(choice), len(options)} == {len(rows)} and choice.shape[1] <= options.shape[1]
    if not alike or (arrays["space"][rows] != space).any():
        raise ValueError(f"indices of space {space} that do not match its points")
    found = zip(map(tuple, choice.tolist()), map(tuple, options.tolist()), strict=True)
    return dict(zip(rows.tolist(), found, strict=True))


def _packed(rows: Sequence[Sequence[int]]) -> np.ndarray:
    found = np.array(rows, dtype=np.int32).reshape(len(rows), len(rows[0]) if rows else 0)
    return found.astype(np.min_scalar_type(int(found.max(initial=0))))
