"""The few points of a frontier that people ask about (fastest, leanest, knee, ...), each with a remark."""

from __future__ import annotations

import math

import numpy as np

from tensoropt.exploration.recommended import recommended
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import OTHER_FAMILY, family
from tensoropt.plan.point_table import PointTable
from tensoropt.units import format_bytes

_NOTABLE = 30
"""The most points in a short table, and in a plot that is not zoomed."""
_FEW = 5
"""The most points if memory is no constraint."""
_APART = 0.01
"""The least relative difference of memory and time to the previous point; closer points are skipped."""
_NO_CONSTRAINT = 0.25
"""The share of a device's memory up to which a frontier is not constrained by it; an assumption."""


def notable(findings: Findings, most: int | None = None) -> dict[int, list[str]]:
    """Return the frontier's points that people ask about, by ascending index, with remarks on each.

    Points are added in this order: the ``fastest`` that fits, the ``leanest``, the ``knee``, the
    ``recommended`` one, and the fastest of each family of plans (DP, ZeRO, TP, ...). Evenly spread points
    follow without a remark; each differs from the previous one by more than 1 % in memory and time.

    Args:
        most: the largest number of points; by default :data:`_NOTABLE`, or fewer if every plan fits easily.
    """
    if most is None:
        most = _FEW if unconstrained_words(findings) else _NOTABLE
    count, found = len(findings.points), dict[int, list[str]]()

    def add(row: int, words: str = "") -> None:
        if row in found or len(found) < most:
            found.setdefault(row, []).extend([words] if words else [])

    if not count:
        return found
    table, fitting = PointTable(findings.points), findings.within(findings.limit_bytes)
    fastest = int(fitting[-1]) if len(fitting) else count - 1
    if len(fitting):
        add(fastest, "fastest")
    add(0, "leanest")
    if len(fitting):
        add(findings.knee, "knee")
    best = recommended(findings, findings.limit_bytes)
    if best is not None and best.row < count:
        add(best.row, "recommended")

    families = {OTHER_FAMILY, family(findings.names[fastest])}
    # Of points with one name, keep the last, which is the fastest.
    last = {name: row for row, name in enumerate(findings.names[:count])}
    for name, row in sorted(last.items(), key=lambda item: -item[1]):
        title = family(name)
        if title not in families:
            families.add(title)
            add(row, f"fastest {title}")
    rows = np.unique([*_apart(table.memory, table.time), *found])
    for row in rows[np.linspace(0, len(rows) - 1, most).astype(int)].tolist():
        add(row)
    return dict(sorted(found.items()))


def _apart(memory: np.ndarray, time: np.ndarray) -> list[int]:
    rows, row = list[int](), 0
    while row < len(memory):
        rows.append(row)
        row = max(
            int(np.searchsorted(memory, memory[row] * (1.0 + _APART), side="right")),
            int(np.searchsorted(-time, -time[row] * (1.0 - _APART), side="right")),
        )
    return rows


def unconstrained_words(findings: Findings) -> str:
    """Return a sentence that all plans fit easily (in a quarter of a device); "" if they do not, or
    if there is a memory budget."""
    device = findings.device_bytes
    if math.isinf(device) or not findings.points or findings.settings.get("memory_bytes"):
        return ""
    largest = float(findings.needs[len(findings.points) - 1])
    if largest > _NO_CONSTRAINT * device:
        return ""
    return (
        f"Memory is no constraint: the fastest plan needs {format_bytes(largest)} of {format_bytes(device)}."
    )
