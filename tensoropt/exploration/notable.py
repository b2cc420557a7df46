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


def notable(findings: Findings, most: int = NOTABLE) -> dict[int, list[str]]:
    """Return the numbers of at most ``most`` points of the frontier, ascending, with what each is.

    In this order, until there are ``most``: ``fastest``, ``leanest``, ``knee``; the fastest of each family of
    plans, and within the memory that the exploration was made for and that of each card of :data:`CARDS_GIB`;
    then, without words, points where the frontier bends most; all of a frontier that has no more.
    """
    count, found = len(findings.points), dict[int, list[str]]()

    def add(row: int, words: str = "") -> None:
        if row in found or len(found) < most:
            found.setdefault(row, []).extend([words] if words else [])

    if not count:
        return found
    table, fastest = PointTable.of(findings.points), count - 1
    for row, title in ((fastest, "fastest"), (0, "leanest"), (findings.knee, "knee")):
        add(row, title)

    asked, within = findings.settings.get("memory_bytes"), dict[int, list[str]]()
    for limit in dict.fromkeys(
        (*((float(asked),) if asked else ()), *(size * 2.0**30 for size in CARDS_GIB))
    ):
        # Ascending in memory, descending in time. What is fastest of all says so already.
        row = int(np.searchsorted(table.memory, limit, side="right")) - 1
        if 0 <= row < fastest:
            within.setdefault(row, []).append(without_zeros(format_bytes(limit)))
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
