"""Common parts of plots: lines and marks, axes, and lines across the plot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .palette import Palette, layout

Json = dict[str, Any]
LEGEND_ABOVE: Json = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0}


def short(values: np.ndarray) -> list[float]:
    """Return values with seven digits: enough for any screen, at half the bytes."""
    return [float(f"{v:.7g}") for v in values.tolist()]


def scatter(mode: str, x: Iterable[Any], y: Iterable[Any], *, hover: str = "", **more: Any) -> Json:
    """Return lines, marks or both; without a tooltip they ignore the pointer."""
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


def across(side: str, at: float, line: Json, **more: Any) -> Json:
    """Return a line across the whole plot at a value of axis ``x`` or ``y``."""
    other = "y" if side == "x" else "x"
    return {
        "type": "line", f"{side}ref": side, f"{side}0": at, f"{side}1": at, f"{other}ref": "paper",
        f"{other}0": 0, f"{other}1": 1, "line": line, **more,
    }  # fmt: skip
