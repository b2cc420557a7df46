"""The words of a device sweep: ``explore --devices`` and ``choose --profile`` end with the same table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tensoropt.console import columns
from tensoropt.units import format_bytes, format_seconds


def profile_answer(sweep: str | os.PathLike[str] | Sequence[Any]) -> tuple[dict[str, Any], str]:
    """The table devices × memory → time, as data and as text."""
    from dataclasses import asdict

    from tensoropt.saved import device_profile

    found = device_profile(sweep)
    rows = [["devices", "kind", *(f"<= {format_bytes(b)}" for b in found.budgets_bytes)]]
    for row in found.rows:
        cells = ("-" if cell is None else format_seconds(cell.time_s) for cell in row.cells)
        rows.append([str(row.devices), row.kind, *cells])
    return {"profile": asdict(found)}, columns(rows, left=(1,))
