"""Measurements drawn over predictions: a line over the memory curve, rows below the timeline."""

from __future__ import annotations

from tensoropt.report.beside import Beside, thinned

from ..views.measured import MOST_EVENTS
from ..views.units import Units
from .palette import palette
from .traces import Json, bars

MEASURED = "measured"


def over_curve(figure: Json, found: Beside, units: Units, scheme: str) -> Json:
    """Return a memory curve with the measured one as a line over it."""
    if not len(found.times_s):
        return figure
    colours = palette(scheme)
    times, sizes = thinned(found.times_s, found.bytes)
    line = {
        "type": "scatter", "mode": "lines", "name": f"{MEASURED}, {found.device}",
        "x": [units.time.of(t) for t in times.tolist()], "y": [units.memory.of(v) for v in sizes.tolist()],
        "line": {"width": 2, "shape": "hv", "color": colours.ink},
        "hovertemplate": "%{y:.3~g} " + units.memory.name + f"<extra>{MEASURED}</extra>",
    }  # fmt: skip
    return {**figure, "data": [*figure["data"], line]}


def below_timeline(figure: Json, found: Beside, units: Units, scheme: str) -> Json:
    """Return a timeline with the measured streams as rows below its own."""
    if not found.events:
        return figure
    colours, unit = palette(scheme), units.time
    shown = sorted(found.events, key=lambda e: -e.duration_s)[:MOST_EVENTS]
    colour = {"compute": colours.ink, "communication": colours.series[3], "copy": colours.series[5]}
    traces = [
        bars(
            mine, f"{MEASURED} ", [unit.of(e.duration_s) for e in mine], [unit.of(e.start_s) for e in mine],
            name=f"{MEASURED} {category}", marker={"color": colour[category], "line": {"width": 0}},
            customdata=[["", unit.text(e.duration_s / found.scale), unit.text(e.start_s)] for e in mine],
            hovertemplate="<b>%{text}</b><br>%{customdata[1]} as measured, drawn from %{customdata[2]}"
            f"<extra>{category}</extra>",
        )
        for category in colour
        if (mine := [e for e in shown if e.phase == category])
    ]  # fmt: skip
    lanes = sorted({f"{MEASURED} {e.lane}" for e in shown})
    axis = figure["layout"]["yaxis"]
    rows = {**axis, "categoryarray": [*axis["categoryarray"], *lanes]}
    return {"data": [*figure["data"], *traces], "layout": {**figure["layout"], "yaxis": rows}}
