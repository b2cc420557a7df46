"""The table of a plan's operators: its heads, its rows, and the rows below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensoropt.report.rows import Share

from .operators import OperatorRow
from .units import Units

Json = dict[str, Any]


def table_rows(rows: Sequence[OperatorRow], node_of: Mapping[str, str], units: Units) -> list[Json]:
    """Return a row per operator, with figures in the page's units.

    Args:
        node_of: operator -> the operator's box in the graph.
    """
    unit, time = units.memory, units.time
    return [
        {
            "group": o.group,
            "module": o.module,
            "axes": o.axes,
            "options": o.options,
            "memory": _known(unit.of, o.memory_bytes),
            "compute": _known(time.of, o.compute_s),
            "copies": _known(time.of, o.copies_s),
            "communication": _known(time.of, o.communication_s),
            "kept": _known(unit.of, o.kept_bytes),
            "source": o.source,
            "node": node_of.get(o.group, ""),
        }
        for o in rows
    ]


def _known(of: Callable[[float], float], figure: float | None) -> float | None:
    """Return a cell, blank if there is no figure; it is rounded here, as on the rest of the page."""
    return None if figure is None else float(f"{of(figure):.3g}")


def columns_of(columns: Sequence[Json], rows: Sequence[OperatorRow], units: Units) -> list[Json]:
    """Return the columns with units in their heads, without modules if none is known, as in ONNX files, and
    without copies if there are none."""
    unit, time = units.memory.name, units.time.name
    heads = {
        "memory": f"memory, {unit}",
        "compute": f"compute, {time}",
        "copies": f"of it copies, {time}",
        "communication": f"communication, {time}",
        "kept": f"keeps, {unit}",
    }
    told = [{**c, "headerName": heads.get(c["field"], c.get("headerName"))} for c in columns]
    known = {"module": any(o.module for o in rows), "copies": any(o.copies_s for o in rows)}
    return [{**c, "hide": not known[c["field"]]} if c["field"] in known else c for c in told]


def bottom_rows(shares: Sequence[Share], units: Units) -> list[Json]:
    """Return the rows below the operators, with blanks instead of zeros."""
    unit, time = units.memory, units.time
    return [
        {
            "group": share.title,
            "memory": _known(unit.of, share.memory_bytes) or None,
            "compute": _known(time.of, share.compute_s) or None,
            "communication": _known(time.of, share.communication_s) or None,
        }
        for share in shares
    ]
