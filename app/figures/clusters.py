"""A plot of money against time for one model's step on several clusters, with iso-cost and iso-time lines."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..state import View
from ..views.clusters import ClustersData, OnCluster
from .palette import Palette, layout, palette

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon", "hexagram")
"""Symbols; combined with the number of colours, pairs repeat late."""
Json = dict[str, Any]


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


def style_of(place: int, colours: Palette) -> tuple[str, str]:
    """Return (colour, symbol) of the cluster at a place of the list."""
    return colours.series[place % len(colours.series)], SYMBOLS[place % len(SYMBOLS)]


def _points(data: ClustersData, place: int, row: OnCluster, keep: np.ndarray) -> Json:
    assert row.money is not None
    rows = np.flatnonzero(keep)
    return {
        "x": [float(f"{v:.7g}") for v in row.curve.time[rows] / data.time.factor],
        "y": [float(f"{v:.7g}") for v in row.money[rows]],
        "customdata": [[place, int(i), f"{row.label}, point {i + 1}"] for i in rows],
        "hovertemplate": "<b>%{customdata[2]}</b><br>%{x:.4~g} "
        + data.time.name
        + " · %{y:.4~g}<extra></extra>",
    }


def _cluster(data: ClustersData, place: int, row: OnCluster, colours: Palette) -> Json:
    colour, symbol = style_of(place, colours)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": row.label,
        "line": {"color": colour, "width": 1},
        "marker": {"color": colour, "symbol": symbol, "size": 8},
        "showlegend": True,
        **_points(data, place, row, row.fitting),
    }


def _rest(data: ClustersData, shown: list[tuple[int, OnCluster]], colours: Palette) -> Json:
    """Return the points that no device has room for: grey, not dropped."""
    found: Json = {"x": [], "y": [], "customdata": []}
    for place, row in shown:
        points = _points(data, place, row, ~row.fitting)
        for name, values in found.items():
            values += points[name]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "does not fit",
        "marker": {"color": colours.faded, "size": 6, "symbol": "x-thin-open"},
        "showlegend": bool(found["x"]),
        "hovertemplate": "<b>%{customdata[2]}</b><br>does not fit<extra></extra>",
        **found,
    }


def _ring(data: ClustersData, place: int | None, word: str, colour: str, size: int) -> Json:
    row = None if place is None else data.rows[place]
    at = [] if row is None or row.money is None or row.offer.point is None else [row.offer.point]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [float(row.curve.time[i] / data.time.factor) for i in at] if row else [],
        "y": [float(row.money[i]) for i in at] if row and row.money is not None else [],
        "text": [word] * len(at),
        # To the right, where slower points of the same cluster lie, there is too much; below is the axis.
        "textposition": "top center",
        "textfont": {"color": colour, "size": 12},
        "marker": {"symbol": "circle-open", "size": size, "color": colour, "line": {"width": 2}},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _layout(data: ClustersData, view: View, colours: Palette) -> Json:
    base = layout(colours)
    lines = [
        (view.within_s and view.within_s / data.time.factor, "x", "iso-time"),
        # Where no price is known there is no line of equal cost.
        (view.within_cost if data.priced else None, "y", "iso-cost"),
    ]
    drawn = [(at, axis, name) for at, axis, name in lines if at]
    return layout(
        colours,
        xaxis={"title": {**base["xaxis"]["title"], "text": f"time per step, {data.time.name}"},
               "rangemode": "tozero", "exponentformat": "none"},
        yaxis={"title": {**base["yaxis"]["title"], "text": data.money_title},
               "rangemode": "tozero", "exponentformat": "none"},
        hovermode="closest",
        clickmode="event",
        uirevision=f"{view.exploration}/{view.amount}/{view.prices}/{view.price}",
        shapes=[_line(axis, at, colours) for at, axis, _ in drawn],
        annotations=[_name(axis, at, name, colours) for at, axis, name in drawn],
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        margin={"l": 64, "r": 16, "t": 16, "b": 48},
    )  # fmt: skip


def _line(axis: str, at: float, colours: Palette) -> Json:
    other = "y" if axis == "x" else "x"
    return {
        "type": "line", f"{axis}ref": axis, f"{other}ref": "paper", f"{axis}0": at, f"{axis}1": at,
        f"{other}0": 0, f"{other}1": 1, "line": {"color": colours.ink, "width": 1.5, "dash": "dash"},
    }  # fmt: skip


def _name(axis: str, at: float, name: str, colours: Palette) -> Json:
    place = {"x": at, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "left"}
    if axis == "y":
        place = {"y": at, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return {**place, "text": name, "showarrow": False, "font": {"color": colours.muted, "size": 12}}
