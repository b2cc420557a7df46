"""The labels of planners' marks in the plot: which marks are named, and where, so that names do not
overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensoropt.plan.plan_names import planner_title

from ..state import View
from ..views.frontier import FrontierData

_NEAR_PX = 12.0
"""The distance, about their size, below which marks share a name."""
_MOST_NAMED = 3
"""The most planners that one label names; it says how many more there are."""
_LETTER_PX, LINE_PX, _GAP_PX = 7.0, 16.0, 14.0
"""About the names' font: a letter's width, a line's height, and the distance from a name's middle to its
mark."""
WIDE_PX, _NARROW_PX, HIGH_PX = 460.0, 220.0, 324.0
"""The sides of the plot: its least width in a wide window and on a phone, and its height. If it is wider,
marks lie farther apart, and names that avoid them here do so there."""
_CLEAR = 1.25
"""The least factor by which a name's middle is farther from any other planner's mark than from its own."""
_PLACES = (
    "top right", "top left", "bottom right", "bottom left", "middle right", "middle left", "top center",
    "bottom center",
)  # fmt: skip
_KNEE = "knee"

_Box = tuple[float, float, float]
"""(left, right, middle) of a name, in pixels."""
Range = Sequence[float]


def mark_labels(
    data: FrontierData, view: View, rows: np.ndarray, ranges: tuple[Range, Range], *, narrow: bool = False
) -> tuple[list[str], list[str]]:
    """Return (text, place) of each mark; the text is "" if another mark names it, or if its name finds no
    room: the mark's tooltip has it.

    Args:
        data: the frontier, with the axes that the view asks for.
        rows: the rows of the marks.
        ranges: the ranges of both axes, in powers of ten if they are logarithmic, as in Plotly.
        narrow: whether the plot is on a phone.
    """
    labels, places = [""] * len(rows), [_PLACES[0]] * len(rows)
    if not len(rows):
        return labels, places
    wide = _NARROW_PX if narrow else WIDE_PX
    x = _pixels(data.axes.x.values, ranges[0], wide, log=view.log_x)
    y = _pixels(data.axes.y.values, ranges[1], HIGH_PX, log=view.log_y)
    taken: list[_Box] = []
    knee = data.special(view).get(_KNEE)
    if knee is not None:
        taken.append(box(x[knee], y[knee], _PLACES[0], _KNEE))
    for at, planners in _named(data, rows, x, y).items():
        row = int(rows[at])
        strangers = [int(i) for i in rows if planner_title(data.planner[i]) not in planners]
        more = len(planners) - _MOST_NAMED
        whole = ", ".join(planners[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        first = planners[0] + (f" and {len(planners) - 1} more" if len(planners) > 1 else "")
        for text in dict.fromkeys((whole, first)):
            place = _free(x, y, row, strangers, text, taken, wide)
            if place is not None:
                labels[at], places[at] = text, place
                taken.append(box(x[row], y[row], place, text))
                break
    return labels, places


def _pixels(values: np.ndarray, ends: Range, side: float, *, log: bool) -> np.ndarray:
    """Return the positions of values on an axis, in pixels."""
    values = np.log10(np.maximum(values, 1e-300)) if log else values
    low, high = ends
    return (values - low) / ((high - low) or 1.0) * side


def _named(data: FrontierData, rows: np.ndarray, x: np.ndarray, y: np.ndarray) -> dict[int, list[str]]:
    """Return place in ``rows`` -> planners: each planner's fastest mark is named, once for all that lie
    there; symbols distinguish the others."""
    names = np.array([data.planner[i] for i in rows])
    named: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        mine = np.flatnonzero(names == name)
        best = int(mine[np.argmin(data.time[rows[mine]])])
        near = [
            at
            for at in named
            if np.hypot(x[rows[at]] - x[rows[best]], y[rows[at]] - y[rows[best]]) < _NEAR_PX
        ]
        named.setdefault(near[0] if near else best, []).append(planner_title(str(name)))
    return named


def box(x: float, y: float, place: str, text: str) -> _Box:
    """Return the box of a name that is printed at a mark."""
    up, side = place.split()
    width = _LETTER_PX * len(text)
    left = x - {"right": 0.0, "left": width, "center": width / 2}[side]
    if up == "middle":  # beside the mark, not over it
        left += {"right": _GAP_PX / 2, "left": -_GAP_PX / 2}[side]
    return left, left + width, y + {"top": _GAP_PX, "bottom": -_GAP_PX, "middle": 0.0}[up]


def _free(
    x: np.ndarray,
    y: np.ndarray,
    row: int,
    strangers: Sequence[int],
    text: str,
    taken: Sequence[_Box],
    wide: float,
) -> str | None:
    """Return a place for a name that keeps it within the plot, off other names and nearer to its own mark
    than to one of ``strangers``, over the fewest points; None if there is none."""
    candidates: list[tuple[int, int]] = []
    for number, place in enumerate(_PLACES):
        left, right, middle = box(x[row], y[row], place, text)
        over = any(a < right and left < b and abs(m - middle) < LINE_PX for a, b, m in taken)
        if over or left < 0 or right > wide:
            continue
        centre = (left + right) / 2
        away = np.hypot(x[strangers] - centre, y[strangers] - middle)
        if len(away) and away.min() < _CLEAR * np.hypot(x[row] - centre, y[row] - middle):
            continue
        points = (x > left) & (x < right) & (np.abs(y - middle) < LINE_PX / 2 + 3)
        candidates.append((int(points.sum()), number))
    return _PLACES[min(candidates)[1]] if candidates else None
