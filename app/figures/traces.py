"""Common parts of plots: lines and marks, axes, and lines across the plot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .palette import Palette, layout

Json = dict[str, Any]


def short(values: np.ndarray) -> list[float]:
    """Return values rounded to seven digits, enough for any screen, which halves their size as JSON."""
    return [float(f"{v:.7g}") for v in values.tolist()]


def scatter(mode: str, x: Iterable[Any], y: Iterable[Any], *, hover: str = "", **more: Any) -> Json:
    """Return a Plotly trace of lines, marks or both; without a tooltip (``hover``) it ignores the pointer."""
    pointed = {"hovertemplate": hover} if hover else {"hoverinfo": "skip"}
    return {"type": "scatter", "mode": mode, "x": x, "y": y, "showlegend": False, **pointed, **more}


def font(colour: str) -> Json:
    """Return the font of a plot's text."""
    return {"color": colour, "size": 12}


def axis(colours: Palette, text: str, *, log: bool) -> Json:
    """Return a titled axis for figures, linear or logarithmic."""
    # Without a format, Plotly labels ticks between powers of ten with a small 2 and 3 instead of 20 and 30.
    scale = {"type": "log", "tickformat": ",~r"} if log else {"type": "linear"}
    own = layout(colours)["xaxis"]
    return {**own, "title": {**own["title"], "text": text}, "exponentformat": "none", "nticks": 8, **scale}


def across(x: float, line: Json) -> Json:
    """Return a vertical line over the whole height of the plot, behind lines and marks."""
    return {
        "type": "line", "xref": "x", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line,
        "layer": "below",
    }  # fmt: skip
