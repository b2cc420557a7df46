"""The plans of an exploration in readable units, and the memory limit that decides which of them fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import parse_qsl

import numpy as np

from tensoropt.costs.device_fit import FITS, TIGHT, Verdict
from tensoropt.errors import InfeasibleError
from tensoropt.exploration.answer import Budgeted, answer
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.facts import facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.notable import notable
from tensoropt.plan.facts_table import Fact
from tensoropt.plan.plan_names import planner_title

from ..state import View, not_understood
from .units import Units, plural, unit_for

MARKS: Mapping[Verdict, str] = {FITS: "fits", TIGHT: "tight"}
"""CSS classes of verdicts; the class of all other verdicts is ``over``."""


@dataclass(frozen=True, eq=False)
class FrontierData:
    """The plans of one exploration by row number: the frontier's points, then other planners' plans.

    Attributes:
        model: the model's display name.
    """

    exploration: Exploration
    model: str
    units: Units

    @classmethod
    def of(cls, exploration: Exploration, model: str = "") -> FrontierData:
        """Return the plans of an exploration, with the units in which they are shown."""
        return cls(exploration, model or exploration.model.source, Units.of(exploration))

    def __len__(self) -> int:
        return len(self.exploration.all_points)

    def facts(self, row: int) -> dict[str, Fact]:
        """Return the figures of the plan in a row, by label."""
        return facts(FigureRow.of(self.exploration, row))

    @property
    def needs(self) -> np.ndarray:
        """The memory in bytes that the plan of every row needs on a device."""
        return self.exploration.needs

    @property
    def time(self) -> np.ndarray:
        """The step time in seconds of every row."""
        return self.exploration.all_points.time

    @cached_property
    def planner(self) -> tuple[str, ...]:
        """The planner that found each row."""
        return self.exploration.all_points.planners

    @cached_property
    def line(self) -> np.ndarray:
        """The rows of the frontier, without rows that need more memory than a faster row."""
        rows = np.arange(len(self.exploration.points))
        # Points ascend in tensor memory, and descend in time.
        least = np.minimum.accumulate(self.needs[rows][::-1])[::-1]
        kept: np.ndarray = rows[self.needs[rows] <= least]
        return kept

    @cached_property
    def notable(self) -> dict[int, list[str]]:
        """What is notable about a point, by row, for the few points that a short table shows."""
        return notable(self.exploration)

    def title(self, row: int) -> str:
        """Return ``Point 17 of 201``, or for another planner's plan the planner's name and a number."""
        words = self.exploration.title(row)
        if row < len(self.exploration.points):
            return words.capitalize()
        return words.replace(self.planner[row], planner_title(self.planner[row]), 1)

    @property
    def capacity_bytes(self) -> float:
        """The memory of the smallest device, in bytes."""
        return self.exploration.device_bytes

    @property
    def device(self) -> str:
        """The kind of the smallest device."""
        return str(min(self.exploration.cluster["kinds"], key=lambda kind: kind["memory_bytes"])["name"])

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.exploration.cluster["devices"])

    def budget_bytes(self, view: View) -> float | None:
        """Return the memory budget of the page state (view), else the exploration's; None if neither has
        one."""
        asked = self.exploration.settings.get("memory_bytes")
        return view.budget_bytes if view.budget_bytes is not None else float(asked) if asked else None

    def limit_bytes(self, view: View) -> float:
        """Return the most memory, in bytes, that a plan may need by the view's budget and headroom."""
        return self.exploration.usable_bytes(self.budget_bytes(view), view.asked_headroom)

    def limit_words(self, view: View) -> str:
        """Return the memory limit of a device in words: ``24 GiB``."""
        limit = self.limit_bytes(view)
        return unit_for(limit).limit(limit).replace(",", "")

    def room_bytes(self, view: View) -> float:
        """Return the memory in bytes within which plans fit: the limit, or without one the whole device."""
        free = self.budget_bytes(view) is None and view.asked_headroom is None
        return self.capacity_bytes if free else self.limit_bytes(view)

    def verdict(self, view: View, row: int) -> Verdict:
        """Return whether the plan of a row fits: fits, fits tightly, or fails."""
        return self.exploration.verdict(row, self.room_bytes(view))

    def mark(self, view: View, row: int) -> str:
        """Return the verdict as a CSS class: ``fits``, ``tight`` or ``over``."""
        return MARKS.get(self.verdict(view, row), "over")

    def answer(self, view: View) -> Budgeted:
        """Return the recommended plan and the usual strategies (such as FSDP) within the view's limit."""
        return answer(self.exploration, self.budget_bytes(view), view.asked_headroom)

    def within_time(self, view: View) -> tuple[int | None, str]:
        """Return (the leanest row within the view's time limit, "") or (None, why there is none)."""
        if view.time_s is None:
            return None, ""
        try:
            return self.exploration.index(time_s=view.time_s, headroom=view.asked_headroom), ""
        except InfeasibleError as error:
            return None, str(error)

    def chosen(self, view: View, found: Budgeted | None = None) -> int:
        """Return the selected row: the view's, else the leanest within its time limit, else the recommended
        one, else the leanest. ``found``: the result of :meth:`answer`, if known."""
        if view.point is not None and view.point < len(self):
            return view.point
        if view.point is None and (row := self.within_time(view)[0]) is not None:
            return row
        found = found or self.answer(view)
        return int(found.row if found.row is not None else found.leanest or 0)


def address_sentences(data: FrontierData, search: str) -> list[str]:
    """Return sentences on the invalid parts of an address's query, one for each."""
    said, view = not_understood(search), View.from_query(search)
    if view.point is not None and view.point >= len(data):
        text = dict(parse_qsl(search.lstrip("?"))).get("point", "")
        said.append(f"Point {text[:20]} does not exist: this frontier has {count_words(data)}.")
    if view.budget_bytes is not None and view.budget_bytes > data.capacity_bytes:
        said.append(budget_fault(data, view.budget_bytes))
    if slow := data.within_time(view)[1]:
        said.append(f"{slow[:1].upper()}{slow[1:]}.")
    return said


def budget_fault(data: FrontierData, budget_bytes: float) -> str:
    """Return why a memory budget is invalid on these devices; "" if it is valid."""
    if budget_bytes <= data.capacity_bytes:
        return ""
    has = unit_for(data.capacity_bytes).limit(data.capacity_bytes)
    return f"{data.device} has {has}, which no plan may exceed; plan on other devices for more."


def count_words(data: FrontierData) -> str:
    """Return ``201 points, 12 plans of other planners``."""
    points = len(data.exploration.points)
    marks = len(data) - points
    return plural(points, "point") + (f", {plural(marks, 'plan')} of other planners" if marks else "")


def without_point(view: View, budget_bytes: float | None) -> View:
    """Return the view with another budget and no selected point, so that the recommended plan is shown."""
    return replace(view, budget_bytes=budget_bytes, point=None, time_s=None)
