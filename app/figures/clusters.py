"""A plot of money against time for one model's step on several clusters, with iso-cost and iso-time lines.

On one cluster money is time times a price, so that all its plans lie on a line, and the fastest is the
cheapest: each cluster is one mark. Both axes are logarithmic, as clusters differ by factors.
"""

from __future__ import annotations

import math
from typing import Any

from ..state import View
from ..views.clusters import ClustersData, OnCluster
from ..views.units import digits
from .palette import Palette, layout, palette, run_colours, run_style
from .traces import LEGEND_ABOVE, Json, across, axis, font, ring, scatter

_ROOM = 1.5
"""The factor of room beside the outermost marks and lines."""


def clusters_figure(data: ClustersData, view: View, scheme: str) -> Json:
    """Return the plot: a mark for each cluster, hollow if beyond a limit and grey if nothing fits, a line
    through those that none beats, rings around the answer."""
    colours = palette(scheme)
    shown = [(place, row) for place, row in enumerate(data.rows) if row.money is not None]
    best = data.unbeaten
    both = data.cheapest == data.fastest
    traces = [
        scatter(
            "lines", [_time(data, row) for row in best], [row.money for row in best],
            name="none is both faster and cheaper", showlegend=len(best) > 1,
            line={"color": colours.muted, "width": 1.5, "dash": "dot", "shape": "hv"},
        ),
        *(_cluster(data, place, row, colours) for place, row in shown),
        _ring(data, data.fastest, "cheapest, fastest" if both else "fastest", colours.other, "top right"),
        _ring(data, None if both else data.cheapest, "cheapest", colours.select, "top left"),
    ]  # fmt: skip
    return {"data": traces, "layout": _layout(data, view, [row for _, row in shown], colours)}


def _time(data: ClustersData, row: OnCluster) -> float:
    return row.time_s / data.time.factor


def _cluster(data: ClustersData, place: int, row: OnCluster, colours: Palette) -> Json:
    number, _, symbol = run_style(place)
    colour = run_colours(colours)[number] if row.offer.index is not None else colours.faded
    return scatter(
        "markers", [_time(data, row)], [row.money], name=row.label, showlegend=True,
        customdata=[[place, row.point, row.label, "<br>".join(row.words)]],
        marker={
            "color": colour, "size": 12, "symbol": f"{symbol}-open" if row.offer.reason else symbol,
            "line": {"width": 2, "color": colour},
        },
        hover="<b>%{customdata[2]}</b><br>%{customdata[3]}<extra></extra>",
    )  # fmt: skip


def _ring(data: ClustersData, place: int | None, word: str, colour: str, side: str) -> Json:
    rows = [] if place is None or data.rows[place].money is None else [data.rows[place]]
    return ring(
        [_time(data, row) for row in rows], [row.money for row in rows], [word] * len(rows), colour, 22,
        textposition=side,
    )  # fmt: skip


def _layout(data: ClustersData, view: View, shown: list[OnCluster], colours: Palette) -> Json:
    lines = [
        (view.within_s and view.within_s / data.time.factor, "x", data.time.name),
        # Where no price is known there is no line of equal cost.
        (view.within_cost if data.priced else None, "y", data.currency),
    ]
    drawn = [(at, side, f"at most {digits(at)} {unit}".rstrip()) for at, side, unit in lines if at]
    ends = {
        side: _range([*values, *(at for at, of, _ in drawn if of == side)])
        for side, values in (
            ("x", [_time(data, row) for row in shown]), ("y", [row.money or 0.0 for row in shown]),
        )
    }  # fmt: skip
    return layout(
        colours,
        xaxis=axis(colours, f"time per step, {data.time.name} (log scale)", log=True)
        | {"range": ends["x"], "nticks": 5},
        yaxis=axis(colours, f"{data.money_title} (log scale)", log=True) | {"range": ends["y"]},
        hovermode="closest",
        clickmode="event",
        uirevision=f"{view.exploration}/{view.amount}/{view.prices}/{view.price}/{view.budget_bytes}",
        shapes=[
            across(side, at, {"color": colours.ink, "width": 1.5, "dash": "dash"}) for at, side, _ in drawn
        ],
        annotations=[_name(side, at, name, colours) for at, side, name in drawn],
        legend=LEGEND_ABOVE | {"y": 1.02},
        margin={"l": 64, "r": 16, "t": 16, "b": 48},
    )  # fmt: skip


def _range(values: list[float]) -> list[float]:
    """Return the ends of a logarithmic axis, in powers of ten as Plotly takes them."""
    if not values:
        return [0.0, 1.0]
    return [math.log10(min(values) / _ROOM), math.log10(max(values) * _ROOM)]


def _name(side: str, at: float, name: str, colours: Palette) -> Json:
    # Annotations on a logarithmic axis are placed by the power of ten.
    place: dict[str, Any] = {
        "x": math.log10(at), "y": 0, "yref": "paper", "yanchor": "bottom", "xanchor": "left"
    }  # fmt: skip
    if side == "y":
        place = {"y": math.log10(at), "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return {**place, "text": name, "showarrow": False, "font": font(colours.muted)}
