"""The names in the plot: which of planners' marks and of the frontier's bends have one, and where, so that
names do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tensoropt.frontier import bends
from tensoropt.plan.plan_names import JOIN, brief_name, planner_title

from ..state import View
from ..views.frontier import FrontierData

_NEAR_PX = 12.0
"""The distance, about their size, below which marks share a name."""
_MOST_NAMED = 3
"""The most planners that one label names; it says how many more there are."""
_LETTER_PX, LINE_PX, _GAP_PX = 7.0, 16.0, 14.0
"""About the names' font: a letter's width, a line's height, and the distance from a name's middle to its
mark."""
WIDE_PX, _NARROW_PX, HIGH_PX = 460.0, 220.0, 300.0
"""The sides of the plot: its least width in a wide window and on a phone, and its least height. If it is
larger, marks lie farther apart, and names that avoid them here do so there."""
_CLEAR = 1.25
"""The least factor by which a name's middle is farther from any other planner's mark than from its own."""
_PLACES = (
    "top right", "top left", "bottom right", "bottom left", "middle right", "middle left", "top center",
    "bottom center",
)  # fmt: skip
_KNEE = "knee"
_MOST_BENDS, _FEW_BENDS, _LEAST_BEND = 5, 3, 0.04
"""The most names along the frontier in a wide window and on a phone, and how far a bend must be off the line
through others, as a share of the plot."""

_Box = tuple[float, float, float]
"""(left, right, middle) of a name, in pixels."""
Range = Sequence[float]


class Labels:
    """The names of one plot, in the order in which they are placed: none is printed over another."""

    def __init__(
        self, data: FrontierData, view: View, ranges: tuple[Range, Range], *, narrow: bool = False
    ) -> None:
        """Begin without names.

        Args:
            data: the frontier, with the axes that the view asks for.
            ranges: the ranges of both axes, in powers of ten if they are logarithmic, as in Plotly.
            narrow: whether the plot is on a phone.
        """
        self._data, self._narrow = data, narrow
        self._wide = _NARROW_PX if narrow else WIDE_PX
        self._x = _pixels(data.axes.x.values, ranges[0], self._wide, log=view.log_x)
        self._y = _pixels(data.axes.y.values, ranges[1], HIGH_PX, log=view.log_y)
        self._knee = data.special(view).get(_KNEE)
        self._taken: list[_Box] = []

    def _placed(
        self, row: int, texts: Iterable[str], strangers: Sequence[int] = (), covered: np.ndarray | None = None
    ) -> tuple[str, str]:
        """Return the first of the texts that has room at a point, and its place; "" if none has.

        Args:
            strangers: the rows of marks to which the text must be less near than to its own point.
            covered: the rows of marks over which it must not be printed.
        """
        for text in texts:
            place = _free(self._x, self._y, row, strangers, covered, text, self._taken, self._wide)
            if place is not None:
                self._taken.append(box(self._x[row], self._y[row], place, text))
                return text, place
        return "", _PLACES[0]

    def of_knee(self, marks: np.ndarray) -> tuple[str, str]:
        """Return (text, place) of the knee: with its plan's name if that has room."""
        if self._knee is None:
            return "", _PLACES[0]
        names = [f"{_KNEE}: {name}" for name in _briefer(self._data.exploration.names[self._knee])]
        found = self._placed(self._knee, (*names, _KNEE), covered=marks)
        return found if found[0] else (_KNEE, _PLACES[0])

    def of_marks(self, rows: np.ndarray) -> tuple[list[str], list[str]]:
        """Return (text, place) of each mark; the text is "" if another mark names it, or if its name finds no
        room: the mark's tooltip has it.

        Args:
            rows: the rows of the marks.
        """
        labels, places = [""] * len(rows), [_PLACES[0]] * len(rows)
        for at, planners in _named(self._data, rows, self._x, self._y).items():
            strangers = [int(i) for i in rows if planner_title(self._data.planner[i]) not in planners]
            more = len(planners) - _MOST_NAMED
            whole = ", ".join(planners[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            first = planners[0] + (f" and {len(planners) - 1} more" if len(planners) > 1 else "")
            labels[at], places[at] = self._placed(int(rows[at]), dict.fromkeys((whole, first)), strangers)
        return labels, places

    def of_bends(self, line: np.ndarray, marks: np.ndarray) -> dict[int, tuple[str, str]]:
        """Return row -> (text, place): the plans at the ends and at the visible bends of a line, each name
        once.

        Args:
            line: the rows of the line's points.
            marks: the rows of planners' marks, which no name may be taken for.
        """
        found: dict[int, tuple[str, str]] = {}
        most = _FEW_BENDS if self._narrow else _MOST_BENDS
        names = self._data.exploration.names
        said = set() if self._knee is None else {brief_name(names[self._knee])}
        for row in line[bends(self._x[line], self._y[line], most + 1, _LEAST_BEND)].tolist():
            name = brief_name(names[row])
            if name not in said:
                text, place = self._placed(row, _briefer(names[row]), covered=marks)
                if text:
                    said |= {name, text}
                    found[row] = text, place
        return found


def _briefer(name: str) -> list[str]:
    """Return a plan's brief name, then its first words alone."""
    brief = brief_name(name)
    return list(dict.fromkeys((brief, JOIN.join(brief.split(JOIN)[:2]))))


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
    covered: np.ndarray | None,
    text: str,
    taken: Sequence[_Box],
    wide: float,
) -> str | None:
    """Return a place for a name that keeps it within the plot, off other names and ``covered`` marks, and
    nearer to its own mark than to one of ``strangers``, over the fewest points; None if there is none."""
    candidates: list[tuple[int, int]] = []
    for number, place in enumerate(_PLACES):
        left, right, middle = box(x[row], y[row], place, text)
        over = any(a < right and left < b and abs(m - middle) < LINE_PX for a, b, m in taken)
        outside = left < 0 or right > wide or not LINE_PX / 2 <= middle <= HIGH_PX - LINE_PX / 2
        if over or outside:
            continue
        if (
            covered is not None
            and (
                (x[covered] > left - _NEAR_PX)
                & (x[covered] < right + _NEAR_PX)
                & (np.abs(y[covered] - middle) < LINE_PX / 2 + _NEAR_PX / 2)
            ).any()
        ):
            continue
        centre = (left + right) / 2
        others = list(strangers)
        away = np.hypot(x[others] - centre, y[others] - middle)
        if len(away) and away.min() < _CLEAR * np.hypot(x[row] - centre, y[row] - middle):
            continue
        points = (x > left) & (x < right) & (np.abs(y - middle) < LINE_PX / 2 + 3)
        candidates.append((int(points.sum()), number))
    return _PLACES[min(candidates)[1]] if candidates else None
