"""Published planners beside the frontier, as a table: what each found, or why it refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tensoropt.exploration.export import compared, limits_asked
from tensoropt.plan.plan_names import planner_title
from tensoropt.planners import ENTRIES
from tensoropt.planners.registry import foreseen_refusal
from tensoropt.units import format_seconds

from ..state import View
from .frontier import FrontierData
from .units import percent, signed, unit_for


@dataclass(frozen=True)
class PlannerRow:
    """The frontier, or one planner, within the budget; ``gap``: over the best time known in its memory."""

    title: str
    limit: str
    memory: str
    time: str
    points: str
    gap: str
    search: str
    remark: str


def planner_rows(data: FrontierData, view: View) -> tuple[PlannerRow, ...]:
    """Return rows in the order in which the planners ran, computed from the points that the plot shows within
    the view's budget; a dash stands for what a planner without a plan there does not have."""
    shown, limit = data.exploration, view.budget_bytes
    # Filters look only at properties of spaces.
    spaces = {shown.all_points[row].space for row in np.flatnonzero(data.passing(replace(view, marks=True)))}
    limits = limits_asked(shown)
    rows = []
    for row in compared(shown, limit, lambda point: point.space in spaces):
        none = row.time_s is None or row.memory_bytes is None or row.gap is None
        remark = "; ".join(row.notes)
        if limits not in ((), (None,)) and limit not in limits:
            # A planner may have a plan within a limit that it was never given.
            words = ", ".join("no limit" if m is None else unit_for(m).text(m) for m in limits)
            remark = "; ".join(filter(None, (remark, f"asked for {words}")))
        rows.append(
            PlannerRow(
                title=planner_title(row.planner),
                limit="none" if limit is None else unit_for(limit).text(limit),
                memory="—" if none else data.units.memory.text(row.memory_bytes or 0.0),
                time="—" if none else data.units.time.text(row.time_s or 0.0),
                points=str(row.points),
                gap="—" if none else signed(round(row.gap or 0.0, 6), percent(abs(row.gap or 0.0))),
                search=format_seconds(row.search_s),
                remark=remark,
            )
        )
    return tuple(rows)


def refusals(devices: int, *, training: bool, attention: bool | None = None) -> dict[str, str]:
    """Return why each planner is known to refuse, by name; "" for those that may find something."""
    return {
        name: foreseen_refusal(entry, devices, training=training, attention=attention)
        for name, entry in ENTRIES.items()
    }


def refusals_beside(data: FrontierData) -> dict[str, str]:
    """Return :func:`refusals` for an exploration, whose operators say whether it has attention."""
    shown = data.exploration
    attention = None
    if shown.recorded is not None:
        attention = any("scaled_dot_product_attention" in op.target for op in shown.recorded.graph.operators)
    training = shown.settings.get("mode", "train") == "train"
    return refusals(len(shown.cluster["devices"]), training=training, attention=attention)
