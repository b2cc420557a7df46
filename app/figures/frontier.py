"""The plot of a frontier's memory against time, as data of a Plotly figure.

The script ``assets/result.js`` moves parts of the plot, which it finds by the indices below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tensoropt.exploration.answer import Budgeted
from tensoropt.exploration.time_range import range_of
from tensoropt.plan.plan_names import JOIN

from ..state import View
from ..views.frontier import FrontierData
from ..views.result import near, pace, rates_of, seen_rows, two_digits
from ..views.units import Unit, unit_for
from .palette import Palette, layout, palette
from .traces import Json, across, axis, font, scatter, short

LINE, DOTS, BASELINES, SELECTED = range(4)
"""Indices of the traces."""
VEIL, DEVICE, GRIP = range(3)
"""Indices of the shapes: the area beyond the budget, a device's memory, the budget's line."""
BUDGET, WORDS = 0, 1
"""Indices of the annotations: the budget's handle, and the first of the plans' names."""
_MOST_LINE = 400
_GRIP_PX = 9
"""The width in pixels in which the budget's line can be grabbed."""
_LETTER_PX, _LINE_PX, _DOT_PX = 7.0, 18.0, 4.0
_WIDE_PX, _NARROW_PX, _HIGH_PX = 560.0, 250.0, 270.0
"""Approximate sizes of the plot in pixels, for placing names."""
_FAR = 1.5
"""A usual strategy this many times slower than the slowest point is named at the plot's edge, not drawn."""
_SHIFTS = (
    (0, -26), (0, 28), (70, -30), (-70, -30), (70, 32), (-70, 32), (110, -60), (-110, -60), (0, -62), (0, 52),
    (110, 60), (-110, 60), (0, -92), (150, -92), (-150, -92),
)  # fmt: skip
"""Positions of a name relative to its point, in pixels."""


def frontier_figure(
    data: FrontierData, view: View, found: Budgeted, scheme: str, *, narrow: bool = False
) -> Json:
    """Return the plot of an exploration's plans as data of a Plotly figure.

    Args:
        view: the selected point and the budget.
        found: the recommended plan and the usual strategies (such as FSDP) for ``view``.
        scheme: the colour scheme.
        narrow: whether the plot is on a phone.
    """
    colours, chosen = palette(scheme), data.chosen(view, found)
    low, high = near(data, view, chosen)
    rows = seen_rows(data, view, chosen)
    hands = np.array([base.row for base in found.baselines if not base.note], dtype=int)
    hands = np.unique(hands[(data.needs[hands] >= low) & (data.needs[hands] <= high)])
    most = _FAR * max(float(data.time[rows].max(initial=0.0)), float(data.time[chosen]))
    far, hands = hands[data.time[hands] > most], hands[data.time[hands] <= most]
    inside = data.line[(data.needs[data.line] >= low) & (data.needs[data.line] <= high)]
    line = data.line
    if len(inside):  # continued beyond both sides of the visible range
        first, last = np.searchsorted(line, inside[[0, -1]])
        line = line[max(first - 1, 0) : last + 2]
    if len(line) > _MOST_LINE:
        line = line[np.unique(np.linspace(0, len(line) - 1, _MOST_LINE).astype(int))]
    seen = np.unique([*rows, *hands, chosen])
    frame = _frame(data, view, found, (low, high), seen, far, colours, narrow=narrow)
    traces = [
        scatter("lines", *_xy(data, line), line={"shape": "hv", "color": colours.accent, "width": 1.5}),
        _marks(data, view, rows, "plans", colours.accent, "circle", 8, colours),
        _marks(data, view, hands, "made by hand", colours.ink, "diamond-open", 11, colours),
        _selected(data, chosen, colours),
    ]
    return {"data": traces, "layout": frame}


def _xy(data: FrontierData, rows: np.ndarray) -> tuple[list[float], list[float]]:
    return short(data.needs[rows] / data.units.memory.factor), short(data.time[rows] / _second(data).factor)


def _second(data: FrontierData) -> Unit:
    """Return the unit of the plot's time axis."""
    fastest = float(data.time[data.line].min(initial=1.0))
    return Unit("s", 1.0) if fastest >= 0.5 else Unit("ms", 1e-3) if fastest >= 5e-4 else Unit("µs", 1e-6)


def _above(data: FrontierData, found: Budgeted, far: np.ndarray, colours: Palette) -> Iterator[Json]:
    """Yield labels, at the plot's upper edge, of usual strategies that are too slow to be drawn."""
    titles = {base.row: base.short for base in found.baselines}
    for number, row in enumerate(far.tolist()[:3]):
        yield {
            "x": data.needs[row] / data.units.memory.factor, "y": 1, "yref": "paper", "yanchor": "top",
            "yshift": -2 - _LINE_PX * number, "showarrow": False, "font": font(colours.muted),
            "text": f"▲ {titles[row]}: {two_digits(data.time[row])}",
        }  # fmt: skip


def _marks(
    data: FrontierData, view: View, rows: np.ndarray, name: str, colour: str, symbol: str, size: int,
    colours: Palette,
) -> Json:  # fmt: skip
    """Return plans as marks with tooltips, grey if they do not fit; the browser knows marks by row number."""
    over = data.needs[rows] > data.room_bytes(view)
    rated, words = rates_of(data, view), []
    for row in rows.tolist():
        figures = [data.units.memory.text(data.needs[row]), two_digits(data.time[row]), pace(rated.of(row))]
        plan = data.exploration.names[row].replace(JOIN, "<br>")
        words.append([row, f"<b>{data.title(row)}</b><br>{' · '.join(filter(None, figures))}<br>{plan}"])
    marker = {
        "color": [colours.faded if far else colour for far in over], "size": size, "symbol": symbol,
        "line": {"width": 2 if symbol.endswith("open") else 0},
    }  # fmt: skip
    return scatter(
        "markers", *_xy(data, rows), hover="%{customdata[1]}<extra></extra>", customdata=words, name=name,
        marker=marker, showlegend=len(rows) > 0,
    )  # fmt: skip


def _selected(data: FrontierData, row: int, colours: Palette) -> Json:
    """Return the ring around the selected point, with its time range as a band."""
    spread, second = range_of(data.exploration, row), _second(data).factor
    band: Json = {"visible": False}
    if spread is not None:
        ends = (spread.high_s - data.time[row], data.time[row] - spread.low_s)
        band = {
            "visible": True, "symmetric": False, "color": colours.band, "thickness": 12, "width": 0,
            "array": [ends[0] / second], "arrayminus": [ends[1] / second],
        }  # fmt: skip
    marker = {"color": colours.select, "size": 17, "symbol": "circle-open", "line": {"width": 3}}
    return scatter(
        "markers", *_xy(data, np.array([row])), name="chosen", marker=marker, error_y=band, showlegend=True
    )


def _frame(
    data: FrontierData, view: View, found: Budgeted, ends: tuple[float, float], seen: np.ndarray,
    far: np.ndarray, colours: Palette, *, narrow: bool,
) -> Json:  # fmt: skip
    size, second = data.units.memory.factor, _second(data).factor
    limit, device = data.limit_bytes(view) / size, data.capacity_bytes / size
    room = 0.04 * (ends[1] - ends[0]) or 0.2 * ends[1]
    x = [(ends[0] - room) / size, (ends[1] + room) / size]
    times = data.time[seen] / second
    tall = 0.2 * (float(np.ptp(times)) or float(times.max()))
    y = [max(float(times.min()) - tall, 0.0), float(times.max()) + tall]
    veil = across(limit, {"width": 0}) | {
        "type": "rect", "x1": max(x[1], limit) * 10, "fillcolor": colours.veil,
    }  # fmt: skip
    grip = {
        "type": "rect", "xsizemode": "pixel", "xref": "x", "xanchor": limit, "x0": -1, "x1": 1,
        "yref": "paper", "y0": 0, "y1": 1, "fillcolor": colours.accent, "layer": "above",
        "line": {"width": _GRIP_PX, "color": "rgba(0,0,0,0)"},
    }  # fmt: skip
    unit = data.units.memory.name
    return layout(
        colours,
        xaxis={**axis(colours, f"needed per device, {unit}", log=False), "range": x},
        yaxis={**axis(colours, f"time per step, {_second(data).name}", log=False), "range": y},
        dragmode=False,
        hovermode="closest",
        clickmode="event",
        shapes=[
            veil,
            across(device, {"width": 1.5, "color": colours.ink, "dash": "dot"}),
            grip,
        ],
        annotations=[
            _budget(data, view, limit, x, colours),
            *_above(data, found, far, colours),
            *_names(data, view, found, (x, y), seen, colours, _NARROW_PX if narrow else _WIDE_PX),
        ],
        # A dragged budget is written in these units, and limited to the device's memory.
        meta={"unit": unit, "most": device},
        legend={
            "orientation": "h", "x": 0, "y": 1.1, "yanchor": "bottom", "font": {"size": 12},
            "itemclick": False, "itemdoubleclick": False,
        },
        margin={"l": 56, "r": 16, "t": 62, "b": 44},
    )  # fmt: skip


def _budget(data: FrontierData, view: View, limit: float, ends: list[float], colours: Palette) -> Json:
    """Return the label by which the budget is dragged: over its line, or at the edge of the plot."""
    text, place = data.limit_words(view), {"x": limit, "xref": "x", "xanchor": "center"}
    whole = unit_for(data.capacity_bytes).limit(data.capacity_bytes)
    if data.limit_bytes(view) == data.capacity_bytes:
        text += f", all of {data.device}"
    elif data.budget_bytes(view) is None:
        text += f" of {whole}"
    if limit <= ends[0]:
        place, text = {"x": 0, "xref": "paper", "xanchor": "left"}, f"◂ {text}"
    elif limit >= ends[1]:
        place, text = {"x": 1, "xref": "paper", "xanchor": "right"}, f"{text} ▸"
    return {
        **place, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "captureevents": True,
        "text": text, "font": font(colours.accent), "bgcolor": colours.surface,
        "bordercolor": colours.accent, "borderpad": 2,
    }  # fmt: skip


def _names(
    data: FrontierData, view: View, found: Budgeted, ends: tuple[list[float], list[float]], seen: np.ndarray,
    colours: Palette, wide: float,
) -> Iterator[Json]:  # fmt: skip
    """Yield labels of the selected, the fastest and the leanest plan, where nothing overlaps them."""
    titles: dict[int, list[str]] = {data.chosen(view, found): ["chosen"]}
    if found.chosen is not None:
        titles.setdefault(found.chosen.fastest, []).append("fastest that fits")
    titles.setdefault(int(data.line[0]), []).append("leanest")
    (low_x, high_x), (low_y, high_y) = ends

    def pixels(row: int) -> tuple[float, float]:
        x, y = (values[0] for values in _xy(data, np.array([row])))
        return (x - low_x) / (high_x - low_x) * wide, (high_y - y) / (high_y - low_y) * _HIGH_PX

    dots = list(map(pixels, seen.tolist()))
    taken: list[tuple[float, float, float]] = []
    for row, words in titles.items():
        x, y = (values[0] for values in _xy(data, np.array([row])))
        if not (low_x <= x <= high_x and low_y <= y <= high_y):
            continue
        text = ", ".join(words)
        at = pixels(row)
        half = _LETTER_PX * len(text) / 2
        for right, down in _SHIFTS:
            left, up = at[0] + right - half, at[1] + down
            box = (left, left + 2 * half, up)
            if left < 0 or box[1] > wide or not _LINE_PX / 2 < up < _HIGH_PX - _LINE_PX / 2:
                continue
            if any(a < box[1] and box[0] < b and abs(c - up) < _LINE_PX for a, b, c in taken):
                continue
            if any(
                box[0] - _DOT_PX < a < box[1] + _DOT_PX and abs(b - up) < _LINE_PX / 2 + _DOT_PX
                for a, b in dots
            ):
                continue
            taken.append(box)
            yield {
                "x": x, "y": y, "ax": right, "ay": down, "text": text, "font": font(colours.ink),
                "showarrow": True, "arrowhead": 0, "arrowwidth": 1, "arrowcolor": colours.muted,
                "bgcolor": colours.surface, "standoff": 8,
            }  # fmt: skip
            break


def compared_figure(frontiers: list[tuple[str, FrontierData]], scheme: str, *, per_sample: bool) -> Json:
    """Return several frontiers in one plot.

    Args:
        frontiers: the title and the frontier of each exploration.
        per_sample: whether times are per sample, because batches differ.
    """
    colours, traces = palette(scheme), list[Any]()
    tints = (*colours.series[:5], colours.ink)
    dashes = ("solid", "dash", "dot")
    for number, (title, data) in enumerate(frontiers):
        works = rates_of(data, View()).work.samples or 1
        rows = data.line
        y = data.time[rows] / (works if per_sample else 1)
        tint = tints[number % len(tints)]
        traces.append(
            scatter(
                "lines+markers", short(data.needs[rows] / 2**30), short(y), name=title,
                hover=f"{title.replace('%', '&#37;')}<br>%{{x:.3~g}} GiB, %{{y:.2~g}} s<extra></extra>",
                line={"shape": "hv", "width": 2, "color": tint, "dash": dashes[number // len(tints) % 3]},
                marker={"size": 6, "color": tint, "maxdisplayed": 30}, showlegend=True,
            )
        )  # fmt: skip
    what = "sample" if per_sample else "step"
    frame = layout(
        colours,
        xaxis=axis(colours, "needed per device, GiB (log scale)", log=True),
        yaxis=axis(colours, f"time per {what}, s (log scale)", log=True),
        hovermode="closest",
        dragmode=False,
        legend={"orientation": "h", "y": -0.2, "x": 0},
    )
    return {"data": traces, "layout": frame}
