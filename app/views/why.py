"""The reasons why a plan is not faster, as rows: looked up, simulated, and explored by jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.verified import load_changed
from tensoropt.report.levers import BOUND, EXPLORED, IMPOSSIBLE, LOOKED_UP, TO_EXPLORE, Lever
from tensoropt.report.step_parts import part_rows
from tensoropt.report.why import Why, looked_up

from ..jobs.record import Job
from ..library import Library
from ..state import View
from .frontier import FrontierData
from .jobs import STATE_WORDS
from .units import Units, percent, signed

_NOTHING = 5e-4
"""The size below which a change counts as none."""


@dataclass(frozen=True)
class Link:
    """The words of a link to a point."""

    text: str
    href: str


@dataclass(frozen=True)
class WhyRow:
    """A change and what it gains.

    Attributes:
        change: the signed share of the step, ``−16 %``.
        better: whether it is faster; None if there is no answer.
        action: ``run`` or ``again`` if a job can be started for it, otherwise ``""``.
        state: the state of its job, in words; ``active`` while it waits or runs.
    """

    key: str
    title: str
    time: str = "—"
    change: str = ""
    better: bool | None = None
    words: str = ""
    link: Link | None = None
    action: str = ""
    state: str = ""
    active: bool = False


def budget_of(data: FrontierData, view: View) -> tuple[float | None, str]:
    """Return (the budget within which everything must fit, a remark on it); None: the point's own memory."""
    assert view.point is not None
    needed, limit = float(data.needs[view.point]), data.limit_bytes(view)
    unit = data.units.memory
    if view.budget_bytes is None:
        return None, f"Within the {unit.text(needed)} that this plan needs, unless stated otherwise."
    if limit < needed:
        return None, (
            f"This plan is over the budget of {unit.limit(limit)}: what follows is within the "
            f"{unit.text(needed)} that it needs."
        )
    return (
        limit,
        f"Within the budget of {unit.limit(limit)}, unless stated otherwise.",
    )


def quick(data: FrontierData, view: View, folder: str, detail: Any) -> Why:
    """Return what is known at once about the selected point."""
    assert view.point is not None
    memory_bytes, _ = budget_of(data, view)
    return looked_up(data.exploration, view.point, memory_bytes=memory_bytes, folder=folder, detail=detail)


def parts(why: Why, units: Units) -> list[list[str]]:
    """Return (title, time, share) of the parts of the step, with the links that are waited for."""
    return [[title, units.time.text(s), percent(share)] for title, s, share in part_rows(why.binding.parts)]


def rows(why: Why, levers: tuple[Lever, ...], data: FrontierData, view: View) -> tuple[WhyRow, ...]:
    """Return levers as rows; points of this frontier are links."""
    return tuple(_row(why, lever, data.units, view) for lever in levers)


def _row(why: Why, lever: Lever, units: Units, view: View, exploration: str = "") -> WhyRow:
    words = lever.words
    if lever.time_s is None:
        return WhyRow(lever.key, lever.title, words=words)
    share = lever.time_s / why.time_s - 1 if why.time_s else 0.0
    none = abs(share) < _NOTHING
    link = None
    if lever.index is not None and (exploration or lever.index != why.index):
        there = replace(view, point=lever.index, other=None)
        if exploration:
            # Bytes, seconds and meshes of one exploration mean nothing in another.
            there = View(exploration=exploration, point=lever.index, headroom=view.headroom, price=view.price)
        needs = "" if lever.memory_bytes is None else f", {units.memory.text(lever.memory_bytes)}"
        link = Link(f"point {lever.index + 1}{needs}", f"/plan?{there.to_query()}")
    return WhyRow(
        lever.key,
        lever.title,
        units.time.text(lever.time_s),
        "±0" if none else signed(share, percent(abs(share))),
        None if none else share < 0,
        words if lever.how in (LOOKED_UP, BOUND, EXPLORED) or words else "",
        link,
    )


def results_of(library: Library, of: str) -> dict[str, str]:
    """Return, for each change, the key of the exploration that was made from the one with the fingerprint
    ``of``, the newest of several; what cannot be read is skipped."""
    by_change: dict[str, str] = {}
    for entry in library.entries():
        try:
            changed = load_changed(entry.folder)
        except TensorOptError:
            continue
        if changed is not None and changed.of == of:
            by_change.setdefault(changed.key, entry.key)
    return by_change


def deeper_rows(
    why: Why,
    data: FrontierData,
    view: View,
    explored: Mapping[str, tuple[str, Exploration]],
    jobs: Mapping[str, Job],
    *,
    can_run: bool,
) -> tuple[WhyRow, ...]:
    """Return the changes that take a search: what was explored, what runs, what can be started.

    Args:
        explored: for each change, the key of its exploration, and the exploration.
        jobs: for each change, the newest job for it.
        can_run: whether this dashboard starts jobs.
    """
    made = []
    for lever in why.deeper:
        job = jobs.get(lever.key)
        if lever.how in (LOOKED_UP, IMPOSSIBLE):
            made.append(_row(why, lever, data.units, view))
            continue
        if lever.key in explored:
            key, exploration = explored[lever.key]
            row = _row(why, why.answered(lever.key, lever.title, exploration), data.units, view, key)
        else:
            assert lever.how == TO_EXPLORE
            row = WhyRow(lever.key, lever.title, words=lever.words)
        made.append(replace(row, **_job_state(job, lever, known=lever.key in explored, can_run=can_run)))
    return tuple(made)


def _job_state(job: Job | None, lever: Lever, *, known: bool, can_run: bool) -> dict[str, Any]:
    if job is not None and job.active:
        stage = job.stages[-1] if job.stages else None
        words = f"{STATE_WORDS[job.state]}: {stage.name}, {stage.done} of {stage.total}" if stage else ""
        return {"state": words or STATE_WORDS[job.state], "active": True}
    if known:
        return {}
    if not can_run:
        return {"state": lever.command}
    if job is not None and job.state != "done":
        return {
            "state": f"{STATE_WORDS[job.state]}{': ' + job.error if job.error else ''}",
            "action": "again",
        }
    return {"action": "run"}
