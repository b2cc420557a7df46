"""Published planners beside the frontier, as a table: what each found, or why it refused."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.planners import ENTRIES
from tensoropt.planners.foreseen import foreseen_refusal
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


def refusals(devices: int, *, training: bool, attention: bool | None = None) -> dict[str, str]:
    """Why each planner is known to refuse, by name; "" for those that may find something."""
    return {
        name: foreseen_refusal(entry, devices, training=training, attention=attention)
        for name, entry in ENTRIES.items()
    }


def refusals_beside(data: FrontierData) -> dict[str, str]:
    """:func:`refusals` for an exploration, whose operators say whether it has attention."""
    found = data.exploration
    attention = None
    if found.recorded is not None:
        attention = any("scaled_dot_product_attention" in op.target for op in found.recorded.graph.operators)
    training = found.settings.get("mode", "train") == "train"
    return refusals(len(found.cluster["devices"]), training=training, attention=attention)
