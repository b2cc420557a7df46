"""The owners of a plan's memory at a moment, as rows of a table and words above it."""

from __future__ import annotations

from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.report.owners import MomentOwners, PointOwners
from tensoropt.simulate.recording import OwnerRow
from tensoropt.units import format_bytes

from .point import KIND_TITLES
from .units import Units, percent, plural

_NO_OPERATOR = "no single operator"


def moment(owners: PointOwners, wanted: int | None, step: int = 0) -> MomentOwners:
    """Return the owners at a point of the curve, ``step`` points on; at the peak if none is requested.

    A point that does not exist (of another plan, or from an older page) also means the peak.
    """
    try:
        at = owners.at(wanted)
    except TensorOptError:
        at = owners.at()
    if step:
        at = owners.at(min(max(at.number + step, 0), len(owners.curve) - 1))
    return at


def until(row: OwnerRow, units: Units) -> str:
    """Say until when it is alive, and what ends it."""
    if row.until_s is None:
        return "stays"
    return f"{units.time.text(row.until_s)}: {row.until}"


def owner_cells(at: MomentOwners, units: Units) -> list[dict[str, Any]]:
    """Return a row per owner, the most bytes first, each in the unit that fits it."""
    whole = at.at.total or 1.0
    return [
        {
            "id": str(number),
            "group": row.operator,
            "operator": row.operator or _NO_OPERATOR,
            "tensor": row.tensor if row.tensor != row.operator else "",
            "what": row.what,
            "kind": KIND_TITLES[row.kind],
            "bytes": row.bytes,
            "size": format_bytes(row.bytes),
            "share": percent(row.bytes / whole),
            "until": until(row, units),
        }
        for number, row in enumerate(at.rows)
    ]


def total_cells(at: MomentOwners, units: Units) -> list[dict[str, Any]]:
    """Return the row below: the sum of all of them, which is the height of the curve there."""
    size = sum(row.bytes for row in at.rows)
    words = {"bytes": size, "size": units.memory.text(size), "share": percent(1.0)}
    return [{"id": "total", "operator": "total", **words}]


def moment_words(owners: PointOwners, at: MomentOwners, units: Units) -> str:
    """Return ``Peak, at 24.5 ms: 1.46 GiB of 462 owners``."""
    where = "Peak, at" if at.number == owners.peak else "At"
    size, time = units.memory.text(at.at.total), units.time.text(at.at.time_s)
    return f"{where} {time}: {size}, {plural(len(at.rows), 'owner')}"
