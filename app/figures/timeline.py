"""The plot of a step over time: each device and link, and what memory holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..views.plan import Bars
from ..views.point import KIND_TITLES
from ..views.units import Units
from .palette import layout, palette
from .traces import LEGEND_ABOVE, Json, across, bars, titled

_ROW, _BESIDE_ROWS = 17, 90
"""The least height of a row, in which the names on bars can be read, and that of what is above and below, in
pixels."""


def timeline_height(figure: Json) -> int:
    """Return the pixels that a timeline needs for its rows."""
    return max(270, _BESIDE_ROWS + _ROW * len(figure["layout"]["yaxis"]["categoryarray"]))


_MESSAGES, _STORED, _COLLECTIVES, _OTHER = "messages", "parameters and gradients", "communication", "other"
_LEGEND = {
    "forward": 0, "backward": 1, "again": 6, "optimizer": 2, _MESSAGES: 4, _STORED: 3, _COLLECTIVES: 5,
    _OTHER: 7,
}  # fmt: skip
"""The legend's entries in the order of a step, each with the place of its colour in ``series``."""
_TITLES = {"again": "computed again"}
_ENTRY = {
    **dict.fromkeys(("send", "send gradient", "send forward", "send backward"), _MESSAGES),
    **dict.fromkeys(("gathered parameters", "gradients"), _STORED),
    "resharding": _COLLECTIVES,
}
"""The entry of a phase; another one that the legend does not have is among the others."""


def _entry_of(phase: str) -> str:
    entry = _ENTRY.get(phase, phase)
    return entry if entry in _LEGEND else _OTHER


def timeline_figure(events: Sequence[Any], units: Units, scheme: str, said: Bars | None = None) -> Json:
    """Return one bar per event, with lanes from top to bottom in order of appearance and one trace per entry
    of the legend. Names are written on bars in the browser, where they fit (``assets/timeline.js``).

    Args:
        events: events with ``name, lane, start_s, duration_s, phase, group``.
        said: the names on the bars, and words about operators; by default, events have their own names.
    """
    said = said or Bars(tuple(e.name for e in events), {})
    colours = palette(scheme)
    unit = units.time
    lanes = list(dict.fromkeys(e.lane for e in events))
    inside: dict[str, list[tuple[Any, str]]] = {}
    for e, name in zip(events, said.names, strict=True):
        inside.setdefault(_entry_of(e.phase), []).append((e, name))
    traces = []
    for entry in filter(inside.__contains__, _LEGEND):
        mine = [e for e, _ in inside[entry]]
        custom = [
            [
                e.group or "",
                unit.text(e.duration_s),
                unit.text(e.start_s),
                said.words.get(e.group, ""),
                e.phase,
            ]
            for e in mine
        ]
        traces.append(
            bars(
                mine, "", [unit.of(e.duration_s) for e in mine], [unit.of(e.start_s) for e in mine],
                name=_TITLES.get(entry, entry), customdata=custom,
                marker={"color": colours.series[_LEGEND[entry]], "line": {"width": 0}},
                hovertemplate="<b>%{text}</b><br>%{customdata[1]} from %{customdata[2]}<br>%{customdata[3]}"
                "<extra>%{customdata[4]}</extra>",
            )
            | {"text": [name for _, name in inside[entry]]}
        )  # fmt: skip
    rows: Json = {
        "autorange": "reversed", "categoryorder": "array", "categoryarray": lanes, "fixedrange": True,
        "dtick": 1,
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
