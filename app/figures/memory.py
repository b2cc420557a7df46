"""The plot of what memory holds during a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..views.point import KIND_TITLES
from ..views.units import Units
from .palette import layout, palette
from .traces import LEGEND_ABOVE, Json, across, titled


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
