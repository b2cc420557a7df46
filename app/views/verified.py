"""Predicted beside measured, for the points whose plans were run."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.plan.verified import Verified

from .frontier import FrontierData
from .units import Unit, percent, signed

MOST_LISTED = 4
NOT_YET = "not verified yet; the last command of the Export page does it"


def of_point(data: FrontierData, row: int, verified: Sequence[Verified]) -> Verified | None:
    """What is known of one point."""
    return next((v for v in verified if v.is_of(data.exploration, int(data.index[row]))), None)


def verified_words(found: Verified, data: FrontierData) -> str:
    """``73.2 MiB tracked (72.3 MiB predicted, +1 %); ...; numbers as unsplit``."""
    if found.error:
        return f"did not run: {found.error}"
    parts = []
    if found.memory_tracked_bytes is not None:
        parts.append(
            _beside(found.memory_tracked_bytes, found.memory_predicted_bytes, data.units.memory, "tracked")
        )
    if found.time_measured_s is not None:
        parts.append(_beside(found.time_measured_s, found.time_predicted_s, data.units.time, "measured"))
    if found.loss_difference is None:
        parts.append("collectives as predicted" if found.ok else "collectives NOT as predicted")
    else:
        parts.append("numbers as unsplit" if found.ok else "FAILED: see `tensoropt verify`")
    return "; ".join(parts)


def _beside(measured: float, predicted: float, unit: Unit, word: str) -> str:
    change = measured / predicted - 1 if predicted else 0.0
    relative = signed(change, percent(abs(change)))
    return f"{unit.text(measured)} {word} ({unit.text(predicted)} predicted, {relative})"


def verified_lines(data: FrontierData, verified: Sequence[Verified]) -> tuple[str, ...]:
    """A line per point that was run, ascending; :data:`NOT_YET` where none was."""
    rows = [(row, of_point(data, row, verified)) for row in range(len(data))] if verified else []
    known = [(row, found) for row, found in rows if found is not None]
    lines = [
        f"{data.label(row)}: {verified_words(found, data)} ({found.checked_on})"
        for row, found in known[:MOST_LISTED]
    ]
    if len(known) > MOST_LISTED:
        lines.append(f"and {len(known) - MOST_LISTED} more")
    return tuple(lines) or (NOT_YET,)
