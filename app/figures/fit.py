"""What the usual strategies need of a device: a bar each, by kind of memory, beside what a device has."""

from __future__ import annotations

from tensoropt.estimate.fit import KINDS, Fit, FitRow

from .palette import layout, palette
from .traces import LEGEND_ABOVE, Json, across, font, titled


def fit_figure(found: Fit, rows: list[FitRow], scheme: str) -> Json:
    """Return the bars of some rows, in GiB, and a line at what a device has."""
    colours = palette(scheme)
    shades = dict(zip(KINDS, (*colours.kinds.values(), colours.faded), strict=True))
    drawn = [row for row in rows if row.parts]
    names = [row.strategy.title for row in drawn]
    traces: list[Json] = [
        {
            "type": "bar", "orientation": "h", "name": kind, "y": names, "marker": {"color": shades[kind]},
            "x": [row.parts[kind] / 2**30 for row in drawn],
            "hovertemplate": f"{kind} %{{x:.3~g}} GiB<extra>%{{y}}</extra>",
        }
        for kind in KINDS
    ]  # fmt: skip
    budget = found.cluster.memory_bytes / 2**30
    most = max([budget, *(row.memory_bytes / 2**30 for row in drawn)])
    side, shift = ("right", -4) if budget > most / 2 else ("left", 4)
    return {
        "data": traces,
        "layout": layout(
            colours,
            barmode="stack", bargap=0.35, showlegend=True,
            legend=LEGEND_ABOVE | {"traceorder": "normal", "y": 1.1},
            xaxis=titled(colours, "GiB of each device", range=[0, 1.04 * most]),
            yaxis={"autorange": "reversed"},
            shapes=[across("x", budget, {"color": colours.select, "width": 2, "dash": "dash"})],
            annotations=[
                {
                    "x": budget, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
                    "xanchor": side, "xshift": shift,
                    "text": f"{budget:.3g} GiB of memory", "font": font(colours.select),
                }
            ],
            margin={"l": 10, "r": 16, "t": 10, "b": 10},
        ),
    }  # fmt: skip
