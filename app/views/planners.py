"""Published planners beside the frontier, as a table: what each found, or why it refused."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.units import format_seconds

from .frontier import FrontierData, planner_title, unit_for
from .units import percent, signed


@dataclass(frozen=True)
class PlannerRow:
    """One planner, or the frontier, under a limit; ``gap``: its time over the best known in its memory."""

    title: str
    limit: str
    memory: str
    time: str
    points: str
    gap: str
    search: str
    remark: str


def planner_rows(data: FrontierData) -> tuple[PlannerRow, ...]:
    """In the order in which they ran; a dash for what a planner that refused did not give."""
    found = []
    for row in data.exploration.comparison:
        refused = row["time_s"] is None
        limit, gap = row["limit_bytes"], row["gap"]
        found.append(
            PlannerRow(
                title=planner_title(row["planner"]),
                limit="none" if limit is None else unit_for(limit).text(limit),
                memory="—" if refused else data.units.memory.text(row["memory_bytes"]),
                time="—" if refused else data.units.time.text(row["time_s"]),
                points=str(row["points"]),
                gap="—" if gap is None else signed(round(gap, 6), percent(abs(gap))),
                search=format_seconds(row["search_s"]),
                remark="; ".join(row["notes"]),
            )
        )
    return tuple(found)
