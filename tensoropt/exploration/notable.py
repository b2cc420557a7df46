"""The few points of a frontier that people ask about, each with what it is."""

from __future__ import annotations

import numpy as np

from tensoropt.frontier import bends
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import OTHER_FAMILY, family
from tensoropt.plan.point_table import PointTable
from tensoropt.units import format_bytes, without_zeros

CARDS_GIB = (16, 24, 40, 80)
"""The memory of the cards that people have."""
NOTABLE = 8
"""The most points of a short table."""


def marks_of(findings: Findings) -> dict[int, list[str]]:
    """Return the special points: ``fastest`` and ``knee`` of those that fit, and ``leanest``."""
    marks: dict[int, list[str]] = {}
    fitting = findings.within(findings.limit_bytes)
    of_fitting = ((int(fitting[-1]), "fastest"), (findings.knee, "knee")) if len(fitting) else ()
    for index, word in (*of_fitting[:1], (0, "leanest"), *of_fitting[1:]):
        marks.setdefault(index, []).append(word)
    return marks


def notable(findings: Findings, most: int = NOTABLE) -> dict[int, list[str]]:
    """Return the numbers of at most ``most`` points of the frontier, ascending, with what each is.

    In this order, until there are ``most``: ``fastest`` of those that fit, ``leanest``, ``knee``; the fastest
    of each family of plans, and within the memory that the exploration was made for and that of each card of
    :data:`CARDS_GIB`; then, without words, points where the frontier bends most; all of a frontier that has
    no more.
    """
    count, found = len(findings.points), dict[int, list[str]]()

    def add(row: int, words: str = "") -> None:
        if row in found or len(found) < most:
            found.setdefault(row, []).extend([words] if words else [])

    if not count:
        return found
    table, marks = PointTable.of(findings.points), marks_of(findings)
    fitting = findings.within(findings.limit_bytes)
    fastest = int(fitting[-1]) if len(fitting) else count - 1
    for row, titles in marks.items():
        for title in titles:
            add(row, title)

    asked, within = findings.settings.get("memory_bytes"), dict[int, list[str]]()
    for limit in dict.fromkeys(
        (*((float(asked),) if asked else ()), *(size * 2.0**30 for size in CARDS_GIB))
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
        add(row, f"fastest within {' and '.join(words)}")
    memory, time = (np.log(np.maximum(costs, 1e-12)) for costs in (table.memory, table.time))
    for row in bends(memory, time, most + len(found)) if count > most else range(count):
        add(row)
    return dict(sorted(found.items()))
