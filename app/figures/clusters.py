"""A plot of money against time for one model's step on several clusters, with iso-cost and iso-time lines."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from ..state import View
from ..views.clusters import ClustersData, OnCluster
from .palette import Palette, layout, palette
from .traces import LEGEND_ABOVE, Json, across, font, ring, scatter, short, titled

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon", "hexagram")
"""Symbols; combined with the number of colours, pairs repeat late."""


def clusters_figure(data: ClustersData, view: View, scheme: str) -> Json:
    """Return the plot: a colour and a symbol for each cluster, grey for what does not fit, rings around the
    answer."""
    colours = palette(scheme)
    shown = [(place, row) for place, row in enumerate(data.rows) if row.money is not None]
    traces = [_cluster(data, place, row, colours) for place, row in shown]
    traces.append(_rest(data, shown, colours))
    both = data.cheapest == data.fastest
    traces += [
        _ring(data, data.cheapest, "cheapest, fastest" if both else "cheapest", colours.select, 19),
        _ring(data, None if both else data.fastest, "fastest", colours.other, 15),
    ]
    return {"data": traces, "layout": _layout(data, view, colours)}


def _style_of(place: int, colours: Palette) -> tuple[str, str]:
    """Return (colour, symbol) of the cluster at a place of the list."""
    return colours.series[place % len(colours.series)], _SYMBOLS[place % len(_SYMBOLS)]


def _points(data: ClustersData, place: int, row: OnCluster, keep: np.ndarray) -> tuple[list[Any], ...]:
    """Return (times, money, what a click and a tooltip know) of some points of a cluster."""
    assert row.money is not None
    rows = np.flatnonzero(keep)
    custom = [[place, int(i), f"{row.label}, point {i + 1}"] for i in rows]
    return short(row.curve.time[rows] / data.time.factor), short(row.money[rows]), custom


def _cluster(data: ClustersData, place: int, row: OnCluster, colours: Palette) -> Json:
    colour, symbol = _style_of(place, colours)
    x, y, custom = _points(data, place, row, row.fitting)
    return scatter(
        "lines+markers", x, y, customdata=custom, name=row.label, showlegend=True,
        line={"color": colour, "width": 1}, marker={"color": colour, "symbol": symbol, "size": 8},
        hover="<b>%{customdata[2]}</b><br>%{x:.4~g} " + data.time.name + " · %{y:.4~g}<extra></extra>",
    )  # fmt: skip


def _rest(data: ClustersData, shown: list[tuple[int, OnCluster]], colours: Palette) -> Json:
    """Return the points that no device has room for: grey, not dropped."""
    unfit = [_points(data, place, row, ~row.fitting) for place, row in shown]
    x, y, custom = (list(chain.from_iterable(points[part] for points in unfit)) for part in range(3))
    return scatter(
        "markers", x, y, customdata=custom, name="does not fit", showlegend=bool(x),
        marker={"color": colours.faded, "size": 6, "symbol": "x-thin-open"},
        hover="<b>%{customdata[2]}</b><br>does not fit<extra></extra>",
    )  # fmt: skip


def _ring(data: ClustersData, place: int | None, word: str, colour: str, size: int) -> Json:
    row = None if place is None else data.rows[place]
    x, y = [], []
    if row is not None and row.money is not None and row.offer.point is not None:
        at = row.offer.point
        x, y = [float(row.curve.time[at] / data.time.factor)], [float(row.money[at])]
    # To the right, where slower points of the same cluster lie, there is too much; below is the axis.
    return ring(x, y, [word] * len(x), colour, size, textposition="top center")


def _layout(data: ClustersData, view: View, colours: Palette) -> Json:
    lines = [
        (view.within_s and view.within_s / data.time.factor, "x", "iso-time"),
        # Where no price is known there is no line of equal cost.
        (view.within_cost if data.priced else None, "y", "iso-cost"),
    ]
    drawn = [(at, axis, name) for at, axis, name in lines if at]
    return layout(
        colours,
        xaxis=titled(colours, f"time per step, {data.time.name}", rangemode="tozero", exponentformat="none"),
        yaxis=titled(colours, data.money_title, rangemode="tozero", exponentformat="none"),
        hovermode="closest",
        clickmode="event",
        uirevision=f"{view.exploration}/{view.amount}/{view.prices}/{view.price}",
        shapes=[
            across(axis, at, {"color": colours.ink, "width": 1.5, "dash": "dash"}) for at, axis, _ in drawn
        ],
        annotations=[_name(axis, at, name, colours) for at, axis, name in drawn],
        legend=LEGEND_ABOVE | {"y": 1.02},
        margin={"l": 64, "r": 16, "t": 16, "b": 48},
    )  # fmt: skip


def _name(axis: str, at: float, name: str, colours: Palette) -> Json:
    place = {"x": at, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "left"}
    if axis == "y":
        place = {"y": at, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return {**place, "text": name, "showarrow": False, "font": font(colours.muted)}
