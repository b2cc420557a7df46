"""The plot of memory against time. Traces and shapes keep their places, so a selection changes only a few
numbers.

Thinning: of many points, one of those that cover each other is drawn. A browser draws an element for every
point, and without a graphics card 20,000 of them take a second (1.4 s with WebGL, which then runs on the
processor). Points closer than a dot's width appear as one dot. For a zoomed part the browser requests a finer
grid over the visible part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensoropt.exploration.facts import listed_facts, range_of
from tensoropt.plan.plan_names import JOIN, OTHER_FAMILY, PLANNER_TITLES, family, is_recomputed, planner_title
from tensoropt.plan.point import FRONTIER

from ..state import View
from ..views.certificate import certificate, has_place
from ..views.frontier import FrontierData, axes_of
from ..views.units import digits, unit_for
from .mark_labels import Labels
from .palette import Palette, layout, palette
from .traces import Json, across, axis, font, ring, scatter, short

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
    places = [np.array([0, len(x) - 1]), _first_of_each(across, up, np.arange(len(x)), most)]
    if window is not None:
        inside = _between(across, window.x) & _between(up, window.y)
        places.append(_first_of_each(across, up, np.flatnonzero(inside), most))
    return np.unique(np.concatenate(places))


def _scaled(values: np.ndarray, log: bool) -> np.ndarray:
    if not log:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(values)


def _between(values: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    low, high = sorted(ends)
    inside: np.ndarray = (values >= low) & (values <= high)
    return inside


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


BAND, LINE, FITS, OVER, COMPUTE, NETWORK, MARKS, KNEE, OTHER, SELECTED, BENDS = range(11)
"""The places of the traces."""
_CAPACITY, _USABLE, BUDGET, TARGET, LIMIT = range(5)
"""The places of the shapes: lines of a device's memory, veils over what limits exclude, the budget's line."""
LABEL = 1
"""The place of the budget's words among the annotations."""
NO_BUDGET = "◂ budget"
"""The words by which a budget is dragged from the plot's edge while there is none."""
NOTHING = "No point passes the filters"
_GRIP_PX = 9
"""The width in which the budget's line can be taken hold of."""
THINNED = "Points much like the one before have no dot; zoom in to see them, or list all."
_FAMILIES = ("DP", "TP", "ZeRO", "CP", "PP", "placed", OTHER_FAMILY)
"""The families of plans in the order of their colours."""
_RECOMPUTED, _OVER_DEVICE = "recomputed", "does not fit"
_SYMBOLS = (
    "diamond", "square", "triangle-up", "cross", "star", "pentagon", "triangle-down", "hexagram", "x",
    "hexagon", "triangle-left", "triangle-right", "octagon", "bowtie", "hourglass", "star-diamond",
    "star-square", "star-triangle-up", "star-triangle-down", "diamond-tall", "diamond-wide",
    "hexagon2", "cross-thin", "x-thin", "asterisk", "hash", "y-up",
)  # fmt: skip
"""One for each published planner, in the order of their titles."""
PARTS = (("compute_s", "optimizer", "compute time"), ("communication_s", "kept", "network time"))
"""The lines below the frontier: a figure, the kind of memory whose colour it has, and what it is called."""
_HOVER = "<b>%{customdata[2]}</b><br>%{x:.4~g} {size} · %{y:.4~g} {time}<br>%{customdata[1]}<extra></extra>"


def frontier_figure(
    data: FrontierData,
    view: View,
    scheme: str,
    window: Window | None = None,
    *,
    thinned: bool = True,
    narrow: bool = False,
) -> Json:
    """Return the whole plot.

    Points above what the device may use are grey, never dropped; a budget or a target puts a veil over what
    it rules out.

    Args:
        data: the frontier.
        view: the choices, and how to draw them.
        scheme: the colour scheme.
        window: the zoomed part, if the axes are those that it belongs to.
        thinned: whether to draw only one of the points that cover each other, for a
            browser that requests more when it zooms. Otherwise all are drawn.
        narrow: whether the plot is on a phone, where fewer names of marks find room.
    """
    colours = palette(scheme)
    data = drawn(data, view)
    whole = np.flatnonzero(data.passing(view) & data.on_frontier)
    frame = _layout(data, view, whole, colours, narrow=narrow)
    # Names keep their places in a zoom, whose end only the browser knows.
    labels = Labels(data, view, frame["meta"]["whole"], narrow=narrow)
    if window is not None and window.of == frame["uirevision"]:
        # Plotly itself keeps a zoom only while the ranges that it is given stay the same; lines below the
        # frontier change them.
        frame["xaxis"]["range"], frame["yaxis"]["range"] = list(window.x), list(window.y)
    else:
        window = None

    def seen(ups: np.ndarray) -> np.ndarray:
        if not thinned:
            return whole
        return whole[apart(data.axes.x.values[whole], ups[whole], (view.log_x, view.log_y), window)]

    on_line = seen(data.axes.y.values)
    dots = on_line
    if window is None and thinned and len(few := worth_a_look(data, whole)) < len(whole):
        dots = few
    fitting = data.fitting(view)[dots]
    fits, over = dots[fitting], dots[~fitting]
    size = 5 if len(whole) > 400 else 7
    parts = view.lines and data.axes.up_time
    none = np.array([], dtype=int)
    near = data.passing(view) & data.by_planners & ~data.far_marks(view)
    marks = np.flatnonzero(near) if view.marks else none
    knee, place = labels.of_knee(marks)
    selection = selection_traces(data, view, colours)
    selection[0] |= {"text": [knee], "textposition": place}
    planners = _planner_marks(data, marks, colours, *labels.of_marks(marks))
    bends = labels.of_bends(fits, marks)
    traces: list[Json] = [
        _band(data, view, on_line, colours),
        _line(data, on_line, data.time, colours.accent, 1.5),
        _families(data, fits, colours, size),
        _dots(data, over, colours.faded, size, _OVER_DEVICE) | {"opacity": 0.6},
        # Lines below the frontier have courses of their own.
        *(
            _dotted(data, seen(data.shown(figure)), data.column(figure), colours.kinds[kind], name, parts)
            for figure, kind, name in PARTS
        ),
        planners,
        # Last, so that they lie above all others.
        *selection,
        _names(data, bends, colours),
        *_legend(data, fits, over, marks, colours, "by" if narrow else "baseline"),
    ]
    return {"data": traces, "layout": frame}


def _names(data: FrontierData, named: Mapping[int, tuple[str, str]], colours: Palette) -> Json:
    """Return the names of plans at bends of the frontier."""
    places = _xy(data, np.array(list(named), dtype=int), data.time)
    return scatter(
        "text", *places, text=[text for text, _ in named.values()],
        textposition=[place for _, place in named.values()], textfont=font(colours.muted),
    )  # fmt: skip


def is_thinned(data: FrontierData, view: View) -> bool:
    """Return whether some points have no dot until the plot is zoomed."""
    whole = np.flatnonzero(data.passing(view) & data.on_frontier)
    return len(worth_a_look(data, whole)) < len(whole) or len(whole) > MOST


def worth_a_look(data: FrontierData, rows: np.ndarray) -> np.ndarray:
    """Return those of the frontier's rows that have a dot in the whole plot: the notable ones; all of what
    filters leave."""
    if len(rows) < int(np.count_nonzero(data.on_frontier)):
        return rows
    return rows[np.isin(rows, list(data.notable))]


def drawn(data: FrontierData, view: View) -> FrontierData:
    """Return the frontier with the axes that a view asks for."""
    return replace(data, axes=axes_of(data, view))


def _band(data: FrontierData, view: View, rows: np.ndarray, colours: Palette) -> Json:
    """Return the certificate between its edges, in the sums of the search."""
    band = certificate(data, rows) if view.band and has_place(view) else None
    size, second = data.units.memory.factor, data.units.time.factor
    around, ups = ([], []) if band is None else band.outline()
    return scatter(
        "lines", short(np.array(around) / size), short(np.array(ups) / second), fill="toself",
        fillcolor=colours.band, line={"color": colours.muted, "width": 1, "dash": "dot"},
        visible=band is not None,
    )  # fmt: skip


def _xy(data: FrontierData, rows: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    axes = data.axes
    ups = axes.y.values if values is data.time else values / data.units.time.factor
    return short(axes.x.values[rows]), short(ups[rows])


def _line(data: FrontierData, rows: np.ndarray, values: np.ndarray, colour: str, width: float) -> Json:
    # Between two points over memory, the leaner one is the best; over other units nothing lies between.
    shape = "hv" if data.axes.over_memory else "linear"
    if data.axes.over_memory:
        # Points ascend in tensors; one that needs more than a faster one is not on the way.
        least = np.minimum.accumulate(data.needs[rows][::-1])[::-1]
        rows = rows[data.needs[rows] <= least]
    line = {"shape": shape, "color": colour, "width": width}
    return scatter("lines", *_xy(data, rows, values), line=line)


def _marks(data: FrontierData, rows: np.ndarray, mode: str, **more: Any) -> Json:
    """Return rows as marks with tooltips, which the browser knows by their numbers."""
    custom = [[int(i), _tooltip(data, int(i)), data.label(int(i))] for i in rows]
    hover = _HOVER.replace("{size}", data.axes.x.unit).replace("{time}", data.axes.y.unit)
    return scatter(mode, *_xy(data, rows, data.time), hover=hover, customdata=custom, **more)


def _dots(data: FrontierData, rows: np.ndarray, colour: str, size: int, name: str) -> Json:
    return _marks(data, rows, "markers", name=name, marker={"color": colour, "size": size})


def _families(data: FrontierData, rows: np.ndarray, colours: Palette, size: int) -> Json:
    """Return the points that fit, in the colours of their families; hollow where blocks are recomputed."""
    names = [data.exploration.names[row] for row in rows]
    own = [family_colour(family(name), colours) for name in names]
    marker = {
        "color": own, "size": size, "line": {"width": 1.5, "color": own},
        "symbol": ["circle-open" if is_recomputed(name) else "circle" for name in names],
    }  # fmt: skip
    return _marks(data, rows, "markers", name="fits", marker=marker)


def family_colour(name: str, colours: Palette) -> str:
    """Return the colour of a family of plans: the same in every exploration."""
    return colours.series[_FAMILIES.index(name)]


def _legend(
    data: FrontierData, fits: np.ndarray, over: np.ndarray, marks: np.ndarray, colours: Palette, by: str
) -> list[Json]:
    """Return an entry of the legend for each shape and colour of points that are there; ``by`` stands before
    the name of a planner."""
    names = [data.exploration.names[row] for row in fits]
    there = {family(name) for name in names}
    entries = [(each, family_colour(each, colours), "circle") for each in _FAMILIES if each in there]
    if any(map(is_recomputed, names)):
        entries.append((_RECOMPUTED, colours.ink, "circle-open"))
    if len(over):
        entries.append((_OVER_DEVICE, colours.faded, "circle"))
    for planner in dict.fromkeys(data.planner[row] for row in marks):
        entries.append((f"{by} {planner_title(planner)}", colours.ink, f"{symbol_of(planner)}-open"))
    return [
        scatter("markers", [None], [None], name=name) | {
            "showlegend": True, "marker": {"color": colour, "symbol": symbol, "size": 8}
        }
        for name, colour, symbol in entries
    ]  # fmt: skip


def _tooltip(data: FrontierData, row: int) -> str:
    """Return a plan's name on lines that a tooltip has room for, and its listed figures."""
    listed = (f"{fact.name} {fact.words}" for fact in listed_facts(data.exploration.all_points[row]))
    return "<br>".join((*data.exploration.names[row].split(JOIN), *listed))


def _dotted(
    data: FrontierData, rows: np.ndarray, values: np.ndarray, colour: str, name: str, shown: bool
) -> Json:
    """Return the paper's figure 6: how much of the step's time is compute, and how much is network."""
    return scatter(
        "lines", *_xy(data, rows if shown else rows[:0], values), name=name, visible=shown, showlegend=True,
        line={"dash": "dot", "color": colour, "width": 2},
    )  # fmt: skip


def symbol_of(planner: str) -> str:
    """Return the shape of a planner's marks: the same in every exploration."""
    published = [name for name in PLANNER_TITLES if name != FRONTIER]
    return _SYMBOLS[published.index(planner) % len(_SYMBOLS)] if planner in published else "circle"


def _planner_marks(
    data: FrontierData, rows: np.ndarray, colours: Palette, labels: list[str], places: list[str]
) -> Json:
    marker = {
        "symbol": [symbol_of(data.planner[i]) for i in rows], "color": colours.surface, "size": 11,
        "line": {"color": colours.ink, "width": 2},
    }  # fmt: skip
    return _marks(
        data, rows, "markers+text", marker=marker, text=labels, textposition=places,
        textfont=font(colours.ink),
    )  # fmt: skip


def selection_traces(data: FrontierData, view: View, colours: Palette) -> list[Json]:
    """Return the traces of the knee, the compared point and the selected point."""
    data = data if data.axes is not None else drawn(data, view)
    return [
        _ring(data, data.special(view).get("knee"), colours.muted, "knee", 13, "circle-open"),
        _ring(data, view.other, colours.other, "compared", 15, "diamond-open"),
        _ring(data, view.point, colours.select, "selected", 17, "circle-open")
        | {"error_y": _time_range(data, view.point, colours)},
    ]


def _time_range(data: FrontierData, row: int | None, colours: Palette) -> Json:
    """Return the range of a predicted time as a band through the point, if it is known and time goes up."""
    there = data.axes.up_time and row is not None and row < len(data)
    found = range_of(data.exploration, int(row or 0)) if there else None
    if found is None:
        return {"visible": False}
    up, down = found.high_s - found.middle_s, found.middle_s - found.low_s
    ends = {"array": [up / data.units.time.factor], "arrayminus": [down / data.units.time.factor]}
    return {"visible": True, "symmetric": False, "color": colours.band, "thickness": 12, "width": 0, **ends}


def _ring(data: FrontierData, row: int | None, colour: str, name: str, size: int, symbol: str) -> Json:
    rows = np.array([row] if row is not None and row < len(data) else [], dtype=int)
    return ring(
        *_xy(data, rows, data.time), [name] * len(rows), colour, size, name=name, textposition="top right",
        mode="markers+text" if name == "knee" else "markers", showlegend=name != "knee" and len(rows) > 0,
        marker={"color": colour, "size": size, "symbol": symbol, "line": {"width": 3, "color": colour}},
    )  # fmt: skip


def _range(low: float, high: float, log: bool, above: float = 0.05, below: float = 0.05) -> list[float]:
    """Return an axis with shares of room for what is written ``above`` the topmost points and ``below`` the
    rest."""
    if log:
        # Plotly takes the range of a logarithmic axis in powers of ten.
        low, high = math.log10(low), math.log10(high)
    room = (high - low) or (2.0 if log else 2 * high)
    return [low - below * room, high + above * room]


def _layout(
    data: FrontierData, view: View, on_line: np.ndarray, colours: Palette, *, narrow: bool = False
) -> Json:
    rows = np.flatnonzero(data.passing(view) & ~data.far_marks(view))
    if not len(rows):
        rows = np.arange(len(data))
    axes = data.axes
    xs, ys = axes.x.values[rows], axes.y.values[rows]
    proven = certificate(data, on_line) if view.band and has_place(view) else None
    if proven is not None:
        xs = np.append(xs, proven.memory[[0, -1]] / data.units.memory.factor)
        ys = np.append(ys, [proven.upper[0], proven.lower[-1]] / np.array(data.units.time.factor))
    capacity = data.capacity_bytes / data.units.memory.factor
    in_view = axes.over_memory and data.near_capacity(float(xs.max()) * data.units.memory.factor, view)
    right = max(xs.max(), capacity) if in_view else xs.max()
    low_y = ys.min()
    if view.lines and axes.up_time and len(on_line):
        parts = np.concatenate([data.shown(figure)[on_line] for figure, *_ in PARTS])
        positive = parts[parts > 0]
        low_y = min(low_y, positive.min() if view.log_y and len(positive) else parts.min())
    named = view.marks and bool(data.by_planners.any())
    ends = (
        _range(xs.min(), right, view.log_x),
        _range(low_y, ys.max(), view.log_y, *([0.1, 0.12] if named else [])),
    )
    return layout(
        colours,
        xaxis={**axis(colours, axes.x.title, log=view.log_x), "range": list(ends[0])},
        yaxis={**axis(colours, axes.y.title, log=view.log_y), "range": list(ends[1])},
        dragmode="zoom",
        hovermode="closest",
        clickmode="event",
        # Plotly keeps a person's zoom as long as this text stays the same: what changes the axes resets it.
        uirevision=f"{view.exploration}/{axes.key}/{view.band}/{view.log_x}/{view.log_y}/{view.mesh}/{view.micro}/{view.devices}",
        shapes=shapes(data, view, colours),
        # Sliders that are dragged answer in the browser over the usual axes only. A double click shows the
        # whole again, for which Plotly by itself takes the axes that it drew first.
        meta={"usual": axes.over_memory and axes.up_time, "whole": ends},
        annotations=[
            _capacity_text(data, view, capacity if in_view else None, colours)
            | {"visible": axes.over_memory},
            budget_label(data, view, colours, ends[0]),
            {
                "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False, "text": NOTHING,
                "visible": not data.passing(view).any(), "font": font(colours.muted) | {"size": 15},
            },
        ],
        legend={
            "orientation": "h", "font": {"size": 11}, "x": 0, "y": -0.17, "itemclick": False,
            "itemdoubleclick": False,
            **({"entrywidth": 0.5, "entrywidthmode": "fraction"} if narrow else {}),
        },
        margin={"l": 64, "r": 16, "t": 48, "b": 48},
    )  # fmt: skip


def shapes(data: FrontierData, view: View, colours: Palette) -> list[Json]:
    """Return the capacity, the capacity less headroom, the veils of budget and target, and the budget's line;
    none off their own axes."""
    data = data if data.axes is not None else drawn(data, view)
    size, second = data.units.memory.factor, data.units.time.factor
    # Shapes keep their places in the list, so that a veil that is off is invisible and far away, not left
    # out.
    far = 1e9
    budget = view.budget_bytes / size if view.budget_bytes and data.axes.over_memory else None
    target = view.target_s / second if view.target_s and data.axes.up_time else None

    def memory(size_bytes: float, **line: Any) -> Json:
        return across(
            "x", size_bytes / size, {"width": 1.5, **line}, layer="below", visible=data.axes.over_memory
        )

    def veil(name: str, limit: float | None) -> Json:
        edge = across(name, limit or far, {"width": 0}, layer="below", visible=limit is not None)
        return {**edge, "type": "rect", f"{name}1": far * 10, "fillcolor": colours.veil}

    return [
        memory(data.capacity_bytes, color=colours.ink),
        memory(data.limit_bytes(replace(view, budget_bytes=None)), color=colours.muted, dash="dash"),
        veil("x", budget),
        veil("y", target),
        {
            "type": "rect", "xsizemode": "pixel", "xref": "x", "xanchor": budget or far, "x0": -1, "x1": 1,
            "yref": "paper", "y0": 0, "y1": 1, "fillcolor": colours.accent, "layer": "above",
            "line": {"width": _GRIP_PX, "color": "rgba(0,0,0,0)"}, "visible": budget is not None,
        },
    ]  # fmt: skip


def budget_label(
    data: FrontierData, view: View, colours: Palette, ends: Sequence[float] | None = None
) -> Json:
    """Return the budget over its line, by which it is dragged; at the plot's edge if it lies beyond, or if
    there is none.

    Args:
        ends: those of the memory axis, as in Plotly; by default those of the whole plot.
    """
    data = data if data.axes is not None else drawn(data, view)
    if ends is None:
        whole = np.flatnonzero(data.passing(view) & data.on_frontier)
        ends = _layout(data, view, whole, colours)["meta"]["whole"][0]
    unit, budget = data.units.memory, view.budget_bytes
    at = np.inf if budget is None else budget / unit.factor
    at = math.log10(at) if view.log_x else at
    text = NO_BUDGET if budget is None else unit.limit(budget)
    place: Json = {"x": at, "xref": "x", "xanchor": "center"}
    if at < ends[0]:
        place, text = {"x": 0, "xref": "paper", "xanchor": "left"}, f"◂ {text}"
    elif at > ends[1]:
        place = {"x": 1, "xref": "paper", "xanchor": "right"}
        text = text if budget is None else f"{text} ▸"
    return {
        **place, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "captureevents": True,
        "visible": data.axes.over_memory, "text": text, "font": font(colours.accent),
        "bgcolor": colours.surface, "bordercolor": colours.accent, "borderpad": 2,
    }  # fmt: skip


def _capacity_text(data: FrontierData, view: View, x: float | None, colours: Palette) -> Json:
    """Return the text of a device's memory, above its line and the budget's words; with an arrow at the right
    edge if that is far out of view."""
    whole = unit_for(data.capacity_bytes)
    text = f"{data.device}: {digits(whole.of(data.capacity_bytes))} {whole.name}"
    place: Json = {"x": 1, "xref": "paper"}
    if x is not None:
        place = {"x": math.log10(x) if view.log_x else x}
    return {
        **place, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right", "showarrow": False,
        "text": text if x is not None else f"{text} →", "font": font(colours.muted), "yshift": 22,
    }  # fmt: skip
