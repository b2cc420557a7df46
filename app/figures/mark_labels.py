"""Which marks of planners are named in the plot, and where the names stand: none is printed over another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..state import View
from ..views.frontier import FrontierData, planner_title

NEAR = 0.02
"""Marks closer than this share of the plot's sides share a label."""
MOST_NAMED = 3
"""Planners that one label names; how many more there are is said."""
LETTER, NARROW_LETTER, LINE_HIGH = 0.012, 0.033, 0.05
"""Shares of the plot's sides, about: a letter's width on a wide window and on a phone, a line's height."""
PLACES = (
    "top right",
    "top left",
    "bottom right",
    "bottom left",
    "middle right",
    "middle left",
    "top center",
    "bottom center",
)
KNEE = "knee"

Box = tuple[float, float, float]
"""(left, right, middle) of a name."""


def mark_labels(
    data: FrontierData, view: View, rows: np.ndarray, *, narrow: bool = False
) -> tuple[list[str], list[str]]:
    """(text, place) of each mark; the text is "" where another names it, or where its name finds no room:
    the mark's tooltip has it.

    Args:
        data: with the axes that the view asks for.
        rows: of the marks.
        narrow: on a phone.
    """
    letter = NARROW_LETTER if narrow else LETTER
    labels, places = [""] * len(rows), [PLACES[0]] * len(rows)
    if not len(rows):
        return labels, places
    x = _shares(data.axes.x.values, log=view.log_x)
    y = _shares(data.axes.y.values, log=view.log_y)
    taken: list[Box] = []
    knee = data.special(view).get(KNEE)
    if knee is not None:
        taken.append(_box(x[knee], y[knee], PLACES[0], len(KNEE) * letter))
    for at, planners in _named(data, rows, x, y).items():
        more = len(planners) - MOST_NAMED
        whole = ", ".join(planners[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        first = planners[0] + (f" and {len(planners) - 1} more" if len(planners) > 1 else "")
        for text in dict.fromkeys((whole, first)):
            place = _free(x, y, int(rows[at]), len(text) * letter, taken)
            if place is not None:
                labels[at], places[at] = text, place
                taken.append(_box(x[rows[at]], y[rows[at]], place, len(text) * letter))
                break
    return labels, places


def _shares(values: np.ndarray, *, log: bool) -> np.ndarray:
    """Values as shares of the plot's side, in which distances on the screen are."""
    values = np.log(np.maximum(values, 1e-300)) if log else values
    return (values - values.min()) / (np.ptp(values) or 1.0)


def _named(data: FrontierData, rows: np.ndarray, x: np.ndarray, y: np.ndarray) -> dict[int, list[str]]:
    """Place in ``rows`` -> planners: each one's fastest mark is named, once for all that lie there; the
    symbol tells the others."""
    names = np.array([data.planner[i] for i in rows])
    found: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        mine = np.flatnonzero(names == name)
        best = int(mine[np.argmin(data.time[rows[mine]])])
        near = [
            at
            for at in found
            if abs(x[rows[at]] - x[rows[best]]) < NEAR and abs(y[rows[at]] - y[rows[best]]) < NEAR
        ]
        found.setdefault(near[0] if near else best, []).append(planner_title(str(name)))
    return found


def _box(x: float, y: float, place: str, width: float) -> Box:
    up, side = place.split()
    left = x - {"right": 0.0, "left": width, "center": width / 2}[side]
    if up == "middle":  # beside the mark, not over it
        left += {"right": LETTER, "left": -LETTER}[side]
    return left, left + width, y + {"top": LINE_HIGH, "bottom": -LINE_HIGH, "middle": 0.0}[up]


def _free(x: np.ndarray, y: np.ndarray, row: int, width: float, taken: Sequence[Box]) -> str | None:
    """The place of a name that keeps within the plot and off other names, over the fewest points; None if
    there is none."""
    found: list[tuple[int, int]] = []
    for number, place in enumerate(PLACES):
        left, right, middle = _box(x[row], y[row], place, width)
        over = any(a < right and left < b and abs(m - middle) < 1.2 * LINE_HIGH for a, b, m in taken)
        if over or left < -0.02 or right > 1.02:
            continue
        points = (x > left) & (x < right) & (np.abs(y - middle) < LINE_HIGH * 0.8)
        found.append((int(points.sum()), number))
    return PLACES[min(found)[1]] if found else None
