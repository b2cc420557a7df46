"""A step over time: what each device and link does when, and what its memory holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..views.point import KIND_TITLES
from ..views.units import Units
from .palette import Palette, layout, palette
from .traces import LEGEND_ABOVE, Json, across, bars, titled

MOST_NAMED = 12
"""The number of rows up to which all have their name, whatever the room; with more, Plotly leaves some
out."""
_PHASE_ORDER = ("forward", "backward", "optimizer")


def _phase_colour(phase: str, colours: Palette) -> str:
    """Return a phase's colour: forward, backward, optimizer and communication are distinguished; anything
    else is grey."""
    known = {phase: colours.series[place] for place, phase in enumerate(_PHASE_ORDER)}
    known |= dict.fromkeys(("gradients", "communication", "resharding"), colours.series[3])
    return known.get(phase, colours.series[7])


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
        known = [[e.group or "", unit.text(e.duration_s), unit.text(e.start_s)] for e in mine]
        traces.append(
            bars(
                mine, "", [unit.of(e.duration_s) for e in mine], [unit.of(e.start_s) for e in mine],
                name=phase, customdata=known,
                marker={"color": _phase_colour(phase, colours), "line": {"width": 0}},
                hovertemplate="<b>%{text}</b><br>%{customdata[1]} from %{customdata[2]}<br>%{customdata[0]}"
                f"<extra>{phase}</extra>",
            )
        )  # fmt: skip
    rows: Json = {
        "autorange": "reversed", "categoryorder": "array", "categoryarray": lanes, "fixedrange": True,
        **({"dtick": 1} if len(lanes) <= MOST_NAMED else {}),
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
