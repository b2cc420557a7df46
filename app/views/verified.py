"""Predictions beside measurements, for the points whose plans were run."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.plan.verified import Verified
from tensoropt.report.miss import ran_parts

from .frontier import FrontierData

_MOST_LISTED = 4
NOT_YET = "not verified yet; the last command of the Export page does it"


def of_point(data: FrontierData, row: int, verified: Sequence[Verified]) -> Verified | None:
    """Return what is known about one point."""
    return next((v for v in verified if v.is_of(data.exploration, row)), None)


def verified_words(found: Verified, data: FrontierData) -> str:
    """Return ``73.2 MiB tracked (72.3 MiB predicted, +1 %); ...; numbers as unsplit``."""
    if found.error:
        return f"did not run: {found.error}"
    parts = ran_parts(found, data.exploration.cluster, data.units.memory.text, data.units.time.text)
    if found.loss_difference is None:
        parts.append("collectives as predicted" if found.ok else "collectives NOT as predicted")
    else:
        parts.append("numbers as unsplit" if found.ok else "FAILED: see `tensoropt verify`")
    return "; ".join(parts)


def verified_lines(data: FrontierData, verified: Sequence[Verified]) -> tuple[str, ...]:
    """Return a line per point that was run, ascending; :data:`NOT_YET` if none was."""
    rows = [(row, of_point(data, row, verified)) for row in range(len(data))] if verified else []
    known = [(row, found) for row, found in rows if found is not None]
    lines = [
        f"{data.label(row)}: {verified_words(found, data)} ({found.checked_on})"
        for row, found in known[:_MOST_LISTED]
    ]
    if len(known) > _MOST_LISTED:
        lines.append(f"and {len(known) - _MOST_LISTED} more")
    return tuple(lines) or (NOT_YET,)
