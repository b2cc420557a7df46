"""The plot of a step over time: each device and link, and what memory holds meanwhile.

Measurements are drawn over predictions: as a line over the memory curve, and as rows below the timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensoropt.report.beside import Beside, thinned

from ..views.plan import MOST_EVENTS
from ..views.point import KIND_TITLES
from ..views.units import Units
from .palette import Palette, layout, palette
from .traces import LEGEND_ABOVE, Json, across, bars, titled

_MEASURED = "measured"


def over_curve(figure: Json, comparison: Beside, units: Units, scheme: str) -> Json:
    """Return a memory curve with the measured one as a line over it."""
    if not len(comparison.times_s):
        return figure
    colours = palette(scheme)
    times, sizes = thinned(comparison.times_s, comparison.bytes)
    line = {
        "type": "scatter", "mode": "lines", "name": f"{_MEASURED}, {comparison.device}",
        "x": [units.time.of(t) for t in times.tolist()], "y": [units.memory.of(v) for v in sizes.tolist()],
        "line": {"width": 2, "shape": "hv", "color": colours.ink},
        "hovertemplate": "%{y:.3~g} " + units.memory.name + f"<extra>{_MEASURED}</extra>",
    }  # fmt: skip
    return {**figure, "data": [*figure["data"], line]}


def below_timeline(figure: Json, comparison: Beside, units: Units, scheme: str) -> Json:
    """Return a timeline with the measured streams as rows below its own."""
    if not comparison.events:
        return figure
    colours, unit = palette(scheme), units.time
    shown = sorted(comparison.events, key=lambda e: -e.duration_s)[:MOST_EVENTS]
    colour = {"compute": colours.ink, "communication": colours.series[3], "copy": colours.series[5]}
    traces = [
        bars(
            mine, f"{_MEASURED} ", [unit.of(e.duration_s) for e in mine], [unit.of(e.start_s) for e in mine],
            name=f"{_MEASURED} {category}", marker={"color": colour[category], "line": {"width": 0}},
            customdata=[["", unit.text(e.duration_s / comparison.scale), unit.text(e.start_s)] for e in mine],
            hovertemplate="<b>%{text}</b><br>%{customdata[1]} as measured, drawn from %{customdata[2]}"
            f"<extra>{category}</extra>",
        )
        for category in colour
        if (mine := [e for e in shown if e.phase == category])
    ]  # fmt: skip
    lanes = sorted({f"{_MEASURED} {e.lane}" for e in shown})
    axis = figure["layout"]["yaxis"]
    rows = {**axis, "categoryarray": [*axis["categoryarray"], *lanes]}
    return {"data": [*figure["data"], *traces], "layout": {**figure["layout"], "yaxis": rows}}


_MOST_NAMED = 12
"""The number of rows up to which all have their name, whatever the room; with more, Plotly leaves some
out."""
_PHASE_ORDER = ("forward", "backward", "optimizer")


def _phase_colour(phase: str, colours: Palette) -> str:
    """Return a phase's colour: forward, backward, optimizer and communication are distinguished; anything
    else is grey."""
    by_phase = {phase: colours.series[place] for place, phase in enumerate(_PHASE_ORDER)}
    by_phase |= dict.fromkeys(("gradients", "communication", "resharding"), colours.series[3])
    return by_phase.get(phase, colours.series[7])


def timeline_figure(events: Sequence[Any], units: Units, scheme: str) -> Json:
    """Return one bar per event, with lanes from top to bottom in order of appearance and one trace per phase.

    Args:
        events: events with ``name, lane, start_s, duration_s, phase, group``.
    """
    colours = palette(scheme)
    unit = units.time
    lanes = list(dict.fromkeys(e.lane for e in events))
    phases = list(dict.fromkeys(e.phase for e in events))
    traces = []
    # In the order of a step; phases that are not known come last, in order of appearance.
    for phase in sorted(phases, key=lambda p: _PHASE_ORDER.index(p) if p in _PHASE_ORDER else 99):
        mine = [e for e in events if e.phase == phase]
        custom = [[e.group or "", unit.text(e.duration_s), unit.text(e.start_s)] for e in mine]
        traces.append(
            bars(
                mine, "", [unit.of(e.duration_s) for e in mine], [unit.of(e.start_s) for e in mine],
                name=phase, customdata=custom,
                marker={"color": _phase_colour(phase, colours), "line": {"width": 0}},
                hovertemplate="<b>%{text}</b><br>%{customdata[1]} from %{customdata[2]}<br>%{customdata[0]}"
                f"<extra>{phase}</extra>",
            )
        )  # fmt: skip
    rows: Json = {
        "autorange": "reversed", "categoryorder": "array", "categoryarray": lanes, "fixedrange": True,
        **({"dtick": 1} if len(lanes) <= _MOST_NAMED else {}),
    }  # fmt: skip
    frame = layout(
        colours,
        barmode="overlay",
        bargap=0.25,
        xaxis=titled(colours, f"time in the step, {unit.name}"),
        yaxis=rows,
        legend=LEGEND_ABOVE,
        margin={"l": 90, "r": 12, "t": 30, "b": 44},
        dragmode="zoom",
        hovermode="closest",
    )
    return {"data": traces, "layout": frame}


def memory_figure(
    times_s: Sequence[float],
    kinds: Mapping[str, Sequence[float]],
    limit_bytes: float,
    units: Units,
    scheme: str,
) -> Json:
    """Return memory over the step, stacked by kind; the limit is drawn if it is near.

    Args:
        times_s: (n,) moments.
        kinds: (n,) bytes by kind.
    """
    colours = palette(scheme)
    xs, traces = [units.time.of(t) for t in times_s], []
    for kind, values in kinds.items():
        if not any(values):
            continue
        title, colour = KIND_TITLES.get(kind, kind), colours.kinds.get(kind, colours.faded)
        traces.append(
            {
                "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": title, "x": xs,
                "y": [units.memory.of(v) for v in values], "fillcolor": colour,
                "line": {"width": 0, "shape": "hv", "color": colour},
                "hovertemplate": f"%{{y:.3~g}} {units.memory.name}<extra>{title}</extra>",
            }
        )  # fmt: skip
    peak = max((sum(column) for column in zip(*kinds.values(), strict=True)), default=0.0)
    limit = {"color": colours.muted, "dash": "dash", "width": 1.5}
    near = peak and limit_bytes <= 2 * peak
    frame = layout(
        colours,
        xaxis=titled(colours, f"time in the step, {units.time.name}"),
        yaxis=titled(colours, f"memory, {units.memory.name}", rangemode="tozero"),
        shapes=[across("y", units.memory.of(limit_bytes), limit)] if near else [],
        hovermode="x unified",
        legend=LEGEND_ABOVE | {"traceorder": "normal"},
        margin={"l": 60, "r": 12, "t": 30, "b": 44},
    )
    return {"data": traces, "layout": frame}
