"""Several frontiers in one plot: one trace each, in the order of the runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import Any

from ..views.runs import AxisOptions, Run, drawn, most_of_each
from ..views.units import Unit, Units, digits, time_unit, unit_for
from .palette import Palette, layout, palette, run_colours, run_style
from .traces import Json, across, axis, font, scatter, short

_MOST_MARKS, _LEAST_MARKS = 1500, 5
"""The most marks drawn in total, and the least for one run. Each mark is an element of its own, while a line
is one path."""


def runs_figure(
    runs: Sequence[Run], shown: Collection[str], axes: AxisOptions, units: Units, scheme: str
) -> Json:
    """Return the whole plot; runs that are not ``shown`` are included but hidden, so that the browser can
    show them.

    Memory is that of the largest device, or this times the number of devices.
    """
    colours = palette(scheme)
    most = most_of_each(runs)
    curves = [drawn(run, axes, most) for run in runs]
    size = _memory_unit(curves, units, axes)
    slowest = max((float(d.y.max()) for d in curves if len(d.y)), default=0.0)
    second = time_unit(slowest) if axes.per_sample else units.time
    if axes.per_second:
        second = Unit("samples/s", 1.0)
    count = sum(len(d.x) for d in curves)
    # Not WebGL: without a graphics card it draws a hundred lines in 1.5 s, paths take a tenth of that.
    marks = 0 if count <= _MOST_MARKS else max(_LEAST_MARKS, _MOST_MARKS // len(runs))
    traces = []
    for run, of in zip(runs, curves, strict=True):
        colour, dash, symbol = run_style(run.style or 0)
        tint = run_colours(colours)[colour]
        size_px = 5 if len(of.x) > 60 else 7
        traces.append(
            scatter(
                "lines+markers", short(of.x / size.factor), short(of.y / second.factor),
                hover=_hover(run, axes, size, second), name=escape(run.label), visible=run.key in shown,
                customdata=[[int(n), ""] for n in of.number],
                line={"shape": "hv", "width": 2, "color": tint, "dash": dash},
                marker={"size": size_px, "color": tint, "symbol": symbol, "maxdisplayed": marks},
            )
        )  # fmt: skip
    across_y = "throughput" if axes.per_second else f"time per {'sample' if axes.per_sample else 'step'}"
    of_what = "all devices (of the largest, times their number)" if axes.total else "per device"
    log_x, log_y = (" (log scale)" if log else "" for log in (axes.log_x, axes.log_y))
    frame = layout(
        colours,
        xaxis=axis(colours, f"memory {of_what}{log_x}, {size.name}", log=axes.log_x),
        yaxis=axis(colours, f"{across_y}{log_y}, {second.name}", log=axes.log_y),
        hovermode="closest",
        clickmode="event",
        dragmode="zoom",
        # A zoom stays while runs are shown and hidden, and goes when the axes mean something else.
        uirevision=str(axes),
        shapes=[] if axes.total else _capacities(runs, shown, size, colours),
        margin={"l": 64, "r": 16, "t": 24, "b": 48},
    )
    return {"data": traces, "layout": frame}


def _memory_unit(curves: Sequence[Any], units: Units, axes: AxisOptions) -> Unit:
    if not axes.total:
        return units.memory
    return unit_for(max((float(d.x.max()) for d in curves if len(d.x)), default=1.0))


def _hover(run: Run, axes: AxisOptions, size: Unit, second: Unit) -> str:
    # A name is a person's: neither markup nor a placeholder of the template.
    name = escape(run.label).replace("%", "&#37;").replace("{", "&#123;")
    per = " per sample" if axes.per_sample else ""
    return (
        f"<b>{name}</b><br>point %{{customdata[0]}} of {run.points:,}<br>"
        f"%{{x:.4~g}} {size.name}{' in all' if axes.total else ''} · %{{y:.4~g}} {second.name}{per}"
        "%{customdata[1]}<extra></extra>"
    )


def _capacities(runs: Sequence[Run], shown: Collection[str], size: Unit, colours: Palette) -> list[Json]:
    """Return lines for the memory of one device of the kinds that have as much, if a shown frontier comes
    near it.

    Plotly makes room for visible shapes: lines far away would squeeze the frontiers.
    """
    kinds: dict[float, dict[str, None]] = {}
    for run in runs:
        if run.head.kind:
            kinds.setdefault(run.head.capacity_bytes, {})[run.head.kind] = None
    lines = []
    for capacity, alike in kinds.items():
        whole = unit_for(capacity)
        most = max(
            (float(r.curve.needs.max()) for r in runs if r.curve is not None and r.points
             and r.head.kind in alike and r.head.capacity_bytes == capacity and r.key in shown),
            default=0.0,
        )  # fmt: skip
        label = {
            "text": f"{escape(', '.join(alike))}: {digits(whole.of(capacity))} {whole.name}", "textangle": 0,
            "textposition": "end", "xanchor": "right", "yanchor": "bottom", "font": font(colours.muted),
        }  # fmt: skip
        line = {"color": colours.muted, "width": 1.5, "dash": "dash"}
        lines.append(
            across(
                "x", capacity / size.factor, line, name="|".join(alike), layer="below",
                visible=most >= capacity / 2, label=label,
            )
        )  # fmt: skip
    return lines
