"""Plans of planners among the points: quick planners run beside every search.

Their plans are simulated like everything else and are taken in if no other point needs as little of both
memory and time. :mod:`tensoropt.planners.quick` says which planners are tried; what was tried and what was
taken in is in the exploration's notes, and by planner in its report under ``tried``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.point import SAME, Point, unbeaten, with_others
from tensoropt.planners.quick import placed_refusal, quick_planners, times_within_less
from tensoropt.planners.registry import Entry
from tensoropt.planners.results import SimulatedPoint
from tensoropt.planners.task import PlanningTask
from tensoropt.session.comparing import planning_task
from tensoropt.session.evaluation import certified, only_used_spaces
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.session.simulations import unbeaten_of
from tensoropt.sharding.constraints import LackingDevicesError

_LESS = 0.95
"""The share of the memory of its leanest plan within which a planner runs again; an assumption."""
_STAGE = "placements"
"""The name of this stage's seconds in a report."""


def with_quick_plans(session: Session, searched: Searched, exploration: Exploration) -> Exploration:
    """Return the exploration with those plans of quick planners that none of its points beats, reduced to one
    frontier.

    If a pipeline is pinned, it has only the pipelines of that pin, as the search found them.
    """
    settings = session.settings
    constraints = settings.constraints
    if constraints is not None and constraints.pipeline is not None and constraints.pipeline.stages > 1:
        return exploration
    with session.clock.stage(_STAGE), ExitStack() as stack:
        kinds, refusals = _kinds(session, searched)
        task = planning_task(session, searched, exploration, kinds, stack)
        # Where no sharded plan is allowed, those that give up soft constraints are the only ones.
        if "placed" in kinds and not searched.refusal and (reason := _against_constraints(task)):
            kinds, refusals = kinds - {"placed"}, {**refusals, "placed plans": reason}
        quick = quick_planners(len(searched.problem.graph.groups), session.cluster.device_count)
        entries = [entry for entry in quick if entry.kind in kinds]
        found, tried = _asked(session, task, entries)
        proven = certified(searched.spaces, [each.point for each in found])
        known = _better_known(searched, task, proven) if searched.spaces else []
        points = with_others(exploration.points, [*known, *proven])
    points = unbeaten(points)
    came_in = Counter(p.planner for p in points if p.planner in tried)
    for planner, row in tried.items():
        row["merged"] = came_in[planner]
    seconds = session.seconds_with(exploration.report, _STAGE)
    kernels = task.placed.limits.kernel_notes if task.placed is not None and "placed" in kinds else ()
    noted = exploration.noted([*kernels, *_notes(tried, refusals)], seconds=seconds, tried=tried)
    return only_used_spaces(replace(noted, spaces=task.base.spaces, points=points))


def _kinds(session: Session, searched: Searched) -> tuple[frozenset[str], dict[str, str]]:
    """Return (the kinds of planners that are tried, for each other kind why not)."""
    settings, groups = session.settings, len(searched.problem.graph.groups)
    kinds, refusals = set() if searched.refusal else {"sharded"}, {}
    if reason := placed_refusal(settings.placements, groups, session.cluster.device_count):
        refusals["placed plans"] = reason
    else:
        kinds.add("placed")
    # The conditions of the search for pipelines; besides, these methods know no constraints.
    suits = settings.pipelines != "never" and settings.constraints is None and not settings.process_memory
    training = searched.problem.graph.atoms.graph.training and not searched.problem.refusal
    if suits and training and session.cluster.device_count > 1 and not searched.refusal:
        kinds.add("pipelined")
    return frozenset(kinds), refusals


def check_found(searched: Searched, exploration: Exploration) -> None:
    """Raise :class:`LackingDevicesError` if no sharded plan is allowed and nobody found another."""
    if exploration.points:
        return
    tried = exploration.report.get("tried", {})
    refusals = dict.fromkeys(row["refusal"] for row in tried.values() if row["refusal"])
    notes = [note for note in exploration.report["notes"] if note.startswith("placed plans were not tried")]
    why = "; ".join([*notes, *refusals]) or "no planner that places operators has a plan"
    given = exploration.settings["constraints"] is not None
    remedy = "take back or soften a constraint" if given else "leave out the devices of one type"
    raise LackingDevicesError(f"no sharded plan: {searched.refusal}; {why}; {remedy}")


def _against_constraints(task: PlanningTask) -> str:
    """Say why placed plans would violate a person's constraints that sharded plans may keep to; "" if they do
    not."""
    assert task.placed is not None
    try:
        against = task.placed.limits.against
    except TensorOptError as error:
        return str(error)
    return "; ".join(against)


def _asked(
    session: Session, task: PlanningTask, entries: Sequence[Entry]
) -> tuple[list[SimulatedPoint], dict[str, dict[str, Any]]]:
    """Return (all points that the planners find, per planner how many, its fastest, or why it has none)"""
    seed = task.base.model.seed
    found: dict[object, SimulatedPoint] = {}
    tried: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        session.report(_STAGE, number, len(entries), entry.name)
        points: list[SimulatedPoint] = []
        reason = ""
        # Never for a memory budget: what is found may not depend on it, as it only says which points fit.
        limit: float | None = None
        for _ in range(times_within_less(entry, len(task.prepared.graph.groups))):
            try:
                within = entry.points(task, limit, seed)
            except TensorOptError as refusal:
                reason = "" if points else str(refusal)
                break
            points += within
            limit = _LESS * min(each.point.memory_bytes for each in within)
        best = min((p.point for p in points), key=lambda p: p.time_s, default=None)
        tried[entry.name] = {
            "points": len(points),
            "memory_bytes": None if best is None else best.memory_bytes,
            "time_s": None if best is None else best.time_s,
            "refusal": reason,
        }
        for p in points:
            found.setdefault(p.point.identity, p)
    session.report(_STAGE, len(entries), len(entries), f"{len(found)} plans of planners")
    return list(found.values()), tried


def _better_known(searched: Searched, task: PlanningTask, found: Sequence[Point]) -> list[Point]:
    """Return strategies that the search found and that are as good as a plan that would be taken in, though
    they are not among the points, which only represent them."""
    best = unbeaten_of(searched.simulations)
    coming_in = {p.identity for p in with_others(task.base.points, found)}
    wanted: dict[int, None] = {}
    for point in (p for p in found if p.identity in coming_in):
        at = int(np.searchsorted(best.memory, point.memory_bytes * (1 + SAME), side="right")) - 1
        if at >= 0 and best.time[at] <= point.time_s * (1 + SAME):
            wanted[at] = None
    points = []
    for space, number in best.origin[list(wanted)].tolist():
        points += searched.simulations[space].points(np.array([number]), task.base.spaces[space], space)
    return list(certified(searched.spaces, points)) if points else []


def _notes(tried: dict[str, dict[str, Any]], refusals: dict[str, str]) -> list[str]:
    """Say what was tried and what was taken in."""
    simulated = sum(row["points"] for row in tried.values())
    came_in = [f"{row['merged']} of {name}" for name, row in tried.items() if row["merged"]]
    note = f"planners beside the search: {', '.join(tried)}: {simulated:,} plans simulated, " + (
        f"among the points are {', '.join(came_in)}" if came_in else "none of them is better than a point"
    )
    without: dict[str, list[str]] = {}
    for name, row in tried.items():
        if not row["points"]:
            without.setdefault(row["refusal"], []).append(name)
    return [
        note,
        *(f"no plan of {', '.join(names)}: {reason}" for reason, names in without.items()),
        *(f"{kind} were not tried: {reason}" for kind, reason in refusals.items()),
    ]
