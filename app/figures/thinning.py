"""The thinning of a plot: of many points, one of those that cover each other is drawn.

A browser draws an element for every point, and 20,000 take one without a graphics card a second (1.4 s with
WebGL, which then runs on the processor). Points that are closer than a dot is wide appear as one dot. For a
zoomed part the browser asks once more, with a finer grid over the part that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST = 1000
"""The number of points up to which each is drawn."""
PLACES = (500, 250)
"""The grid's cells across and up: about two pixels each in a wide window, where a dot has five."""


@dataclass(frozen=True)
class Window:
    """The part that a person zoomed into, in the axes' own numbers (powers of ten on logarithmic ones).

    Attributes:
        of: the axes that the zoom belongs to: with other axes it does not apply.
        x, y: both ends of each axis, as in Plotly.
    """

    of: str
    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def read(cls, kept: Any) -> Window | None:
        """Return the window that a browser sends; None if that is not a window."""
        if not isinstance(kept, Mapping) or not isinstance(kept.get("of"), str):
            return None
        x, y = _ends(kept.get("x")), _ends(kept.get("y"))
        return None if x is None or y is None else cls(kept["of"], x, y)


def _ends(kept: Any) -> tuple[float, float] | None:
    if not isinstance(kept, list) or len(kept) != 2:
        return None
    if not all(isinstance(e, (int, float)) and np.isfinite(e) for e in kept):
        return None
    return kept[0], kept[1]


def apart(
    x: np.ndarray, y: np.ndarray, logs: Sequence[bool], window: Window | None = None, most: int = MOST
) -> np.ndarray:
    """Return the places in ``x`` and ``y`` of the points to draw, ascending.

    Up to ``most`` points, all are drawn; of more, the first in each cell of the plot's grid, and in each cell
    of the zoomed window's grid. The first and the last point are among them.

    Args:
        x, y: the coordinates of the points.
        logs: whether each axis is logarithmic; what is not above 0 has no place on such an axis.
        window: the zoomed part.
    """
    if len(x) <= most:
        return np.arange(len(x))
    across, up = (_scaled(values, log) for values, log in zip((x, y), logs, strict=True))
    found = [np.array([0, len(x) - 1]), _first_of_each(across, up, np.arange(len(x)), most)]
    if window is not None:
        inside = _between(across, window.x) & _between(up, window.y)
        found.append(_first_of_each(across, up, np.flatnonzero(inside), most))
    return np.unique(np.concatenate(found))


def _scaled(values: np.ndarray, log: bool) -> np.ndarray:
    if not log:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(values)


def _between(values: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    low, high = sorted(ends)
    found: np.ndarray = (values >= low) & (values <= high)
    return found


def _first_of_each(across: np.ndarray, up: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the first of ``rows`` in each cell of a grid, of coarser grids until at most ``most`` are
    left."""
    rows = rows[np.isfinite(across[rows]) & np.isfinite(up[rows])]
    places = np.array(PLACES)
    while len(rows) > most:
        columns, lines = (
            ((values[rows] - values[rows].min()) / (np.ptp(values[rows]) or 1.0) * count).astype(np.int64)
            for values, count in zip((across, up), places, strict=True)
        )
        rows = rows[np.sort(np.unique(columns * (places[1] + 2) + lines, return_index=True)[1])]
        places = np.maximum(places * 2 // 3, 1)
    return rows
