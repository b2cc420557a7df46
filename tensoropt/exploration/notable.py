"""The few points of a frontier that people ask about, each with what it is."""

from __future__ import annotations

import numpy as np

from tensoropt.exploration.recommended import recommended
from tensoropt.frontier import bends
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import OTHER_FAMILY, family
from tensoropt.plan.point_table import PointTable
from tensoropt.units import format_bytes, without_zeros

_CARDS_GIB = (16, 24, 40, 80)
"""The memory of the cards that people have."""
_NOTABLE = 30
"""The most points of a short table, and of a plot that is not zoomed."""
_FEW = 5
"""The same where memory is no constraint."""
_APART = 0.01
"""The share of memory and of time by which a point differs from the one before, or is not looked at."""
_NO_CONSTRAINT = 0.25
"""The share of a device's memory within which all of a frontier is no matter of memory; an assumption."""


def _marks_of(findings: Findings) -> dict[int, list[str]]:
    """Return the special points: ``fastest`` and ``knee`` of those that fit, and ``leanest``."""
    marks: dict[int, list[str]] = {}
    fitting = findings.within(findings.limit_bytes)
    of_fitting = ((int(fitting[-1]), "fastest"), (findings.knee, "knee")) if len(fitting) else ()
    for index, word in (*of_fitting[:1], (0, "leanest"), *of_fitting[1:]):
        marks.setdefault(index, []).append(word)
    return marks


def notable(findings: Findings, most: int | None = None) -> dict[int, list[str]]:
    """Return the numbers of at most ``most`` points of the frontier, ascending, with what each is.

    In this order, until there are ``most``: ``fastest`` of those that fit, ``leanest``, ``knee``,
    ``recommended``; the fastest of each family of plans, and within the memory that the exploration was made
    for and that of each card of :data:`_CARDS_GIB`; then, without words, points that differ by more than 1 %
    in memory and in time from the one before; of many, those where the frontier bends most.

    Args:
        most: by default a few, and fewer where memory is no constraint (:func:`unconstrained_words`).
    """
    if most is None:
        most = _FEW if unconstrained_words(findings) else _NOTABLE
    count, found = len(findings.points), dict[int, list[str]]()

    def add(row: int, words: str = "") -> None:
        if row in found or len(found) < most:
            found.setdefault(row, []).extend([words] if words else [])

    if not count:
        return found
    table, marks = PointTable.of(findings.points), _marks_of(findings)
    fitting = findings.within(findings.limit_bytes)
    fastest = int(fitting[-1]) if len(fitting) else count - 1
    for row, titles in marks.items():
        for title in titles:
            add(row, title)
    best = recommended(findings, findings.limit_bytes)
    if best is not None and best.row < count:
        add(best.row, "recommended")

    asked, within = findings.settings.get("memory_bytes"), dict[int, list[str]]()
    for limit in dict.fromkeys(
        (*((float(asked),) if asked else ()), *(size * 2.0**30 for size in _CARDS_GIB))
    ):
        # Descending in time. What is fastest of all says so already.
        rows = findings.within(limit)
        if len(rows) and rows[-1] < fastest:
            within.setdefault(int(rows[-1]), []).append(without_zeros(format_bytes(limit)))
    families = {OTHER_FAMILY, family(findings.names[fastest])}
    # Of many points with one name, only the last is asked about: it is the fastest.
    last = {name: row for row, name in enumerate(findings.names[:count])}
    for name, row in sorted(last.items(), key=lambda item: -item[1]):
        title = family(name)
        if title not in families:
            families.add(title)
            add(row, f"fastest {title}")
    for row, words in within.items():
        add(row, f"fastest within {' to '.join(dict.fromkeys((words[0], words[-1])))}")
    rows = np.unique([*_apart(table.memory, table.time), *found])
    memory, time = (np.log(np.maximum(costs[rows], 1e-12)) for costs in (table.memory, table.time))
    for place in bends(memory, time, most + len(found)) if len(rows) > most else range(len(rows)):
        add(int(rows[place]))
    for row in rows[np.linspace(0, len(rows) - 1, most).astype(int)]:  # where a frontier bends little
        add(int(row))
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
    """Return a sentence that says that memory is no constraint; "" if it may be one."""
    kinds = findings.cluster.get("kinds")
    if not kinds or not findings.points or findings.settings.get("memory_bytes"):
        return ""
    device = min(kind["memory_bytes"] for kind in kinds)
    largest = float(findings.needs[len(findings.points) - 1])
    if largest > _NO_CONSTRAINT * device:
        return ""
    return (
        f"Memory is no constraint: the fastest plan needs {format_bytes(largest)} of {format_bytes(device)}."
    )
