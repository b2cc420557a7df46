"""Colours of the light and dark schemes, with contrasts of 4.5:1 for text and 3:1 for marks at least, which
colour-blind readers can tell apart.

``tests/app/figures/test_palette.py`` computes both. The hues follow Okabe and Ito, "Color Universal Design"
(2008), darkened or lightened to keep the contrast on their surface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Scheme = Literal["light", "dark"]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"


@dataclass(frozen=True)
class Palette:
    """The colours of a scheme; ``series`` are those of several frontiers in one plot."""

    surface: str
    ink: str
    muted: str
    grid: str
    accent: str
    select: str
    faded: str
    veil: str
    band: str
    series: tuple[str, ...]


LIGHT = Palette(
    surface="#ffffff", ink="#1b2733", muted="#52606d", grid="#e3e8ed", accent="#0b5fa5", select="#b3410a",
    faded="#8b97a3", veil="rgba(82,96,109,0.13)", band="rgba(11,95,165,0.14)",
    series=("#0b5fa5", "#c05600", "#00785c", "#a2457f", "#4a90c8", "#8a6d00", "#5b4bb3"),
)  # fmt: skip
DARK = Palette(
    surface="#1a222b", ink="#e6ecf2", muted="#a3b1bf", grid="#2f3b47", accent="#6cb6ff", select="#ff9e5e",
    faded="#75828f", veil="rgba(163,177,191,0.14)", band="rgba(108,182,255,0.18)",
    series=("#6cb6ff", "#f0a04b", "#2bc49b", "#e08fc0", "#b6dbff", "#e3cf57", "#a99cf5"),
)  # fmt: skip


def palette(scheme: str) -> Palette:
    """Return the colours of a scheme; light for any name but ``dark``."""
    return DARK if scheme == "dark" else LIGHT


def layout(colours: Palette, **more: Any) -> dict[str, Any]:
    """Return the layout that all plots start from."""
    axis = {
        "gridcolor": colours.grid, "linecolor": colours.grid, "zeroline": False, "automargin": True,
        "tickfont": {"color": colours.muted, "size": 12},
        "title": {"font": {"color": colours.ink, "size": 13}, "standoff": 8},
    }  # fmt: skip
    base: dict[str, Any] = {
        "paper_bgcolor": colours.surface,
        "plot_bgcolor": colours.surface,
        "font": {"family": FONT, "color": colours.ink, "size": 13},
        "margin": {"l": 64, "r": 16, "t": 16, "b": 48},
        "hoverlabel": {
            "bgcolor": colours.ink, "bordercolor": colours.ink, "align": "left",
            "font": {"color": colours.surface, "family": FONT, "size": 13},
        },
        "xaxis": dict(axis),
        "yaxis": dict(axis),
        # The buttons would cover text at the plot's corner.
        "modebar": {"bgcolor": colours.surface, "color": colours.muted, "activecolor": colours.accent},
    }  # fmt: skip
    for name, value in more.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


GRAPH_CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "tensoropt"},
}
"""Settings of all plots: no data leaves the machine, no logo."""
