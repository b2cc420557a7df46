"""The table of a frontier's points, column by column, so that thousands of rows are a few arrays."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensoropt.plan.figures import KEPT, LISTED
from tensoropt.plan.plan_names import brief_name, planner_title

from ..state import View
from .frontier import FrontierData, rate_arrays

SHOWN = (*(KEPT[name] for name in ("memory_bytes", "time_s", "compute_s", "communication_s")), *LISTED)
"""The figures that have a column; its name is their label."""
_FIGURES = 4
"""The significant figures of a number in the table."""


def table_columns(data: FrontierData, view: View) -> dict[str, np.ndarray | list[str]]:
    """Return numbers as floats in the units of the columns' heads (NaN if unknown), and words as lists; one
    value per row of ``data``, whatever the filters keep."""
    rates = rate_arrays(data, view)
    points, names = data.exploration.all_points, data.exploration.names
    unknown = np.full(len(data), np.nan)
    short = {name: brief_name(name) for name in set(names)}
    columns: dict[str, np.ndarray | list[str]] = {
        "point": np.where(data.on_frontier, np.arange(len(data)) + 1.0, np.nan),
        "needs": data.needs / data.units.memory.factor,
        **{figure.label: data.shown(figure.name) for figure in SHOWN},
        "mesh": list(data.mesh),
        "micro": data.micro.astype(float),
        "devices": data.devices.astype(float),
        "name": list(names),
        "short": [short[name] for name in names],
        "is": [_what_it_is(data, row) for row in range(len(data))],
        "few": np.isin(np.arange(len(data)), list(data.notable)).astype(float),
        "gap": [point.proven.replace("-", "—") for point in points],
        "fits": data.fitting(view).astype(float),
    }
    for name in ("rate", "mfu", "device_hours", "cost"):
        values = getattr(rates, name)
        columns[name] = unknown if values is None else values * (100.0 if name == "mfu" else 1.0)
    return columns


def _what_it_is(data: FrontierData, row: int) -> str:
    """Return what a point of the frontier is called, and which planner found it if not the search."""
    planner = [f"by {planner_title(data.planner[row])}"] if data.by_planners[row] else []
    return ", ".join((*data.notable.get(row, ()), *planner))


def table_rows(
    columns: Mapping[str, np.ndarray | list[str]], rows: Iterable[int] | None = None
) -> list[dict[str, Any]]:
    """Return the columns as a dict per row, numbers as the table shows them and None if unknown.

    Args:
        columns: the columns from :func:`table_columns`.
        rows: the rows to return; all by default.
    """
    wanted = range(len(columns["point"])) if rows is None else rows
    return [{name: _shown(values[i]) for name, values in columns.items()} for i in wanted]


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return None if np.isnan(value) else float(f"{value:.{_FIGURES}g}")


def packed(columns: Mapping[str, np.ndarray | list[str]]) -> dict[str, Any]:
    """Return the columns for the browser, which makes rows of them (``assets/points.js``).

    Numbers are little-endian 32-bit floats in base64 (seven figures, of which four are shown); words are
    given once and then by their number.
    """
    columns_packed: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values, np.ndarray):
            columns_packed[name] = {"floats": base64.b64encode(values.astype("<f4").tobytes()).decode()}
        else:
            places = {word: place for place, word in enumerate(dict.fromkeys(values))}
            columns_packed[name] = {"words": list(places), "at": [places[word] for word in values]}
    return columns_packed
