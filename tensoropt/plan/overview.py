"""What Python and notebooks show of an exploration: a headline, a few rows of its frontier, its picture."""

from __future__ import annotations

from html import escape

from tensoropt.console import columns
from tensoropt.plan.facts_table import table_html
from tensoropt.plan.findings import Findings
from tensoropt.plan.frontier_picture import draw_frontier
from tensoropt.plan.frontier_table import HEADER, shown_points, table_rows
from tensoropt.plan.made_for import device_words, made_for
from tensoropt.plan.point import Point
from tensoropt.units import counted

ROWS = 12
"""Points in a ``repr``: with headline and remarks it stays under 25 lines, a small terminal's height."""
DRAWN = 400
"""Points in a notebook's picture, which is 720 units wide: more of them fall on each other."""
LEFT = (1, 8)
"""Columns of words."""
LEFT_OUT = ("parameters/{size}", "figures", "gap")
"""Columns of a printed frontier that would not fit into a terminal's width."""


class PointSequence(tuple[Point, ...]):
    """The points of a frontier, as a tuple that shows itself as a table."""

    _found: Findings

    @classmethod
    def of(cls, found: Findings) -> PointSequence:
        """The points of an exploration's frontier."""
        points = cls(found.points)
        points._found = found
        return points

    def __repr__(self) -> str:
        return _frontier_words(self._found)

    def _repr_html_(self) -> str:
        return _frontier_html(self._found)

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (tuple(self),))  # elsewhere the points alone are wanted


def title_of(found: Findings) -> str:
    """The model and the cluster in words: ``zoo:gpt2 on dgx-h100``."""
    return f"{found.model.source or 'a model'} on {found.cluster.get('name', 'a cluster')}"


def headline(found: Findings) -> str:
    """What was explored, where and for what: one line."""
    cluster = made_for(found.cluster)
    devices = f" ({device_words(cluster)})" if cluster is not None else ""
    step = "training step" if found.settings.get("mode", "train") == "train" else "inference step"
    return f"Exploration of a {step} of {title_of(found)}{devices}"


def _frontier_words(found: Findings) -> str:
    """The frontier as a table of at most :data:`ROWS` rows: both ends, the knee, some between."""
    if not found.points:
        return "no points"
    rows = _rows(found)
    return f"{columns(rows, left=LEFT)}\n{_counted(found, len(rows) - 1)}"


def _frontier_html(found: Findings) -> str:
    """The same table for a notebook."""
    if not found.points:
        return "<p>no points</p>"
    rows = _rows(found)
    return f"<div>{table_html(rows, LEFT)}<p>{escape(_counted(found, len(rows) - 1))}</p></div>"


def overview(found: Findings) -> str:
    """The headline, the frontier's table, and how to go on: what ``repr`` of an exploration is."""
    return "\n".join([headline(found), _frontier_words(found), *_remarks(found)])


def overview_html(found: Findings) -> str:
    """The same for a notebook, with the frontier's picture."""
    picture = ""
    if found.points:
        svg = draw_frontier(found, title=title_of(found), indices=shown_points(found, DRAWN))
        picture = f'<div style="max-width:720px">{svg}</div>'
    remarks = "".join(f"<p>{escape(line)}</p>" for line in _remarks(found))
    title = f"<p><b>{escape(headline(found))}</b></p>"
    return f"<div>{title}{picture}{_frontier_html(found)}{remarks}</div>"


def _rows(found: Findings) -> list[list[str]]:
    """Header and rows; what is special about a point stands beside its number, the longest words last."""
    columns_kept = [i for i, name in enumerate(HEADER[:-1]) if name not in LEFT_OUT]
    rows = table_rows(found, shown_points(found, ROWS))
    return [[row[0], row[-1].removeprefix("<- "), *(row[i] for i in columns_kept[1:])] for row in rows]


def _counted(found: Findings, shown: int) -> str:
    count = len(found.points)
    return counted(count, "point") if shown == count else f"{shown} of {counted(count, 'point')} shown"


def _remarks(found: Findings) -> list[str]:
    """What else there is to know: the spaces searched, what other planners found, how well it is proven."""
    exact = sum(point.exact for point in found.points)
    lines = [
        f"{counted(len(found.spaces), 'space')} (mesh and micro-batches) searched; {counted(exact, 'point')} "
        "proven exact in the additive model"
    ]
    if found.others:
        names = ", ".join(dict.fromkeys(point.planner for point in found.others))
        lines.append(f"{counted(len(found.others), 'point')} of other planners: {names}")
    return lines
