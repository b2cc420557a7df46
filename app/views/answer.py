"""The answer over the plot, among the points that the filters keep: the recommended plan within the
budget, and the baselines beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.exploration.answer import Budgeted, answer, devices_words, without_plans
from tensoropt.plan.plan_names import planner_title

from ..state import View
from .frontier import FrontierData
from .units import unit_for


@dataclass(frozen=True)
class BaselineRow:
    """A baseline in words; figures and the name of the plan are empty if a planner found none.

    Attributes:
        title: its usual name.
        plan: the name of its plan.
        memory, time: what it needs and takes, with units.
        verdict: how much longer its step takes than the answer's, what it needs, or why there is no plan.
        link: the address at which it is compared with the selected point.
        use: the address at which its plan is written and run.
    """

    title: str
    plan: str
    memory: str
    time: str
    verdict: str
    link: str
    use: str = ""


@dataclass(frozen=True)
class AnswerWords:
    """The answer in parts, as the page sets them: the budget is a field between the first two.

    Attributes:
        room: the budget where none is typed: what a device leaves.
        devices: ``each of 8 H100-80GB``.
        plan: the plan's name; "" if none fits.
        costs: its figures, or that none fits.
        beside: sentences about the baselines, more memory and the jobs that run today.
        baselines: all of them.
    """

    room: str
    devices: str
    plan: str
    costs: str
    beside: str
    baselines: tuple[BaselineRow, ...]


def answer_to(data: FrontierData, view: View) -> Budgeted:
    """Return the answer to a view, among the points that its filters keep."""
    # Without a budget that of the device, whatever the exploration was made for: the field is empty.
    headroom = view.headroom if view.budget_bytes is None else view.asked_headroom
    return answer(data.exploration, view.budget_bytes, headroom, data.asked_about(view))


def answer_words(data: FrontierData, view: View) -> AnswerWords:
    """Return the answer to a view, among the points that its filters keep: within its budget, or without one
    within what a device leaves."""
    memory, time = data.units.memory.text, data.units.time.text
    asked = data.asked_about(view)
    found = answer_to(data, view)
    free = data.limit_bytes(replace(view, budget_bytes=None))
    rows = tuple(
        BaselineRow(
            base.title,
            data.exploration.names[base.row],
            memory(base.needs_bytes),
            time(base.point.time_s),
            f"{base.verdict(memory)}; {base.note}" if base.note else base.verdict(memory),
            f"?{replace(view, other=base.row).to_query()}"
            if base.row != view.point and not base.note
            else "",
            f"/export?{replace(view, point=base.row, other=None).to_query()}" if not base.note else "",
        )
        for base in found.baselines
    )
    refused: dict[str, list[str]] = {}
    for name, why in without_plans(data.exploration).items():
        refused.setdefault(why, []).append(planner_title(name))
    rows += tuple(BaselineRow(", ".join(names), "", "", "", why, "") for why, names in refused.items())
    return AnswerWords(
        unit_for(free).limit(free),
        devices_words(data.exploration) + (found.limit_words if view.budget_bytes is not None else ""),
        found.name,
        found.costs(memory, time) if len(asked) else "no point passes the filters",
        " ".join([*found.beside(memory), *found.jobs_words()]),
        rows,
    )
