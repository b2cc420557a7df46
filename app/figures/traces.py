"""The parts that plots share: lines and marks, rings around a point, axes, and lines across the plot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .palette import Palette, layout

Json = dict[str, Any]
LEGEND_ABOVE: Json = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0}


def short(values: np.ndarray) -> list[float]:
    """Return values with seven figures: enough for any screen, half the bytes on the way to it."""
    return [float(f"{v:.7g}") for v in values.tolist()]


def scatter(mode: str, x: Iterable[Any], y: Iterable[Any], *, hover: str = "", **more: Any) -> Json:
    """Return lines, marks or both; without a tooltip they do not react to the pointer."""
    pointed = {"hovertemplate": hover} if hover else {"hoverinfo": "skip"}
    return {"type": "scatter", "mode": mode, "x": x, "y": y, "showlegend": False, **pointed, **more}


def font(colour: str) -> Json:
    """Return the font of words in a plot."""
    return {"color": colour, "size": 12}


def axis(colours: Palette, text: str, *, log: bool) -> Json:
    """Return an axis of figures, with a title, linear or logarithmic."""
    # With a format, Plotly writes ticks between powers of ten as 20 and 30; without one, as a small 2 and 3.
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
