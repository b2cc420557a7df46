"""Quick planners (usual strategies and heuristics), which run after every search.

Their plans are simulated like all others, and join the exploration's points if no point is as good in both
memory and time. :mod:`tensoropt.planners.quick` chooses the planners. The exploration's notes, and its report
under ``tried``, name the planners and the number of plans that joined.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tensoropt.costs.cost_graph import VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.plan_names import HEURISTICS
from tensoropt.plan.point import Point, reduce_points, unbeaten
from tensoropt.planners.quick import (
    BASELINES,
    LEAST_S,
    MOST_LIMITS,
    SHARDED,
    SHARE,
    placed_refusal,
    quick_planners,
)
from tensoropt.planners.registry import Entry
from tensoropt.planners.sharded.data_parallel import local_statistics_s
from tensoropt.planners.task import PlanningTask
from tensoropt.session.comparing import planning_task
from tensoropt.session.evaluation import certified, only_used_spaces
from tensoropt.session.pipelines import pinned_pipeline
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.sharding.constraints import LackingDevicesError
from tensoropt.units import share_words

_LESS = 0.95
"""The fraction of the leanest point's memory within which heuristics are also run; an assumption."""
_DDP = "data_parallel"
_STAGE = "planners"
"""The name of this stage in progress displays and in a report's durations."""


_Chosen = tuple[dict[Any, int], dict[Any, int]]


class First(NamedTuple):
    """The answer before the search: plans of usual strategies (DDP, FSDP, ...), and their cost tables."""

    searched: Searched
    exploration: Exploration

    def plans_of(self, planner: str, task: PlanningTask, searched: Searched) -> list[Point]:
        """Return a planner's plans from the answer before the search, simulated again at the costs of the
        whole search, for which more was timed. Plans on meshes that were not searched are left out."""
        number = {(s.mesh.label, s.tables.mesh): at for at, s in enumerate(searched.spaces)}
        chosen: dict[int, list[_Chosen]] = {}
        for point in self.exploration.others:
            of = self.searched.spaces[point.space]
            at = number.get((of.mesh.label, of.tables.mesh))
            if point.planner == planner and at is not None:
                chosen.setdefault(at, []).append(_chosen(point, of.tables, searched.spaces[at].tables))
        found = []
        for at, rows in chosen.items():
            (evaluation,), names = searched.simulations[at].evaluator(rows), task.base.spaces[at]
            for row, one in enumerate(rows):
                memory, compute, communication = searched.spaces[at].tables.breakdown(*one)
                additive = memory, compute + communication
                found.append(evaluation.point(row, names, at, additive=additive, planner=planner))
        return found


def with_quick_plans(
    session: Session, searched: Searched, exploration: Exploration, first: First | None = None
) -> Exploration:
    """Return the exploration with those plans of quick planners that none of its points beats.

    After Ctrl-C, planners that have not run yet are left out. If the user's constraints ask for a pipeline,
    the exploration is returned unchanged.

    Args:
        first: the answer before the search, whose planners are not run again. If the search was interrupted,
            only its plans are added.
    """
    settings = session.settings
    if (pin := pinned_pipeline(settings)) is not None and pin.stages > 1:
        return exploration
    with session.clock.stage(_STAGE), ExitStack() as stack:
        kinds, refusals = _kinds(session, searched)
        task = planning_task(session, searched, exploration, kinds, stack)
        # Where no sharded plan is allowed, those that give up soft constraints are the only ones.
        if "placed" in kinds and not searched.refusal and (reason := _against_constraints(task)):
            kinds, refusals = kinds - {"placed"}, {**refusals, "placed plans": reason}
        quick = quick_planners(len(searched.problem.graph.groups), session.cluster.device_count)
        if settings.first:
            kinds, quick = kinds & {"sharded"}, tuple(entry for entry in quick if entry.name in SHARDED)
        entries = [entry for entry in quick if entry.kind in kinds]
        if session.left:
            entries = [entry for entry in entries if entry.name in SHARDED and first is not None]
        always = session.settings.placements == "always" or bool(searched.refusal)
        most_s = float("inf") if always else max(SHARE * sum(session.clock.seconds.values()), LEAST_S)
        asking, waiting = _Asking(task, most_s), list(entries)
        try:
            for number, entry in enumerate(entries):
                session.progress(_STAGE, number, len(entries), entry.name)
                if first is not None and entry.name in SHARDED:
                    asking.take(entry.name, first.plans_of(entry.name, task, searched))
                    asking.refusals[entry.name] = first.exploration.report["tried"][entry.name]["refusal"]
                else:
                    asking.ask(entry)
                del waiting[0]
            points, left_out = _asked_within_points(session, searched, exploration, asking, entries)
        except KeyboardInterrupt:
            entries = entries[: len(entries) - len(waiting)]
            points, left_out = _asked_within_points(session, searched, exploration, asking, ())
            session.left.extend([e.name for e in waiting] or ["heuristics within the points' memory"])
        left_out += asking.notes()
    tried = asking.tried(entries)
    came_in = Counter(p.planner for p in points if p.planner in tried)
    for planner, row in tried.items():
        row["merged"] = came_in[planner]
    seconds = session.seconds_with(exploration.report, _STAGE)
    kernels = task.placed.limits.kernel_notes if task.placed is not None and "placed" in kinds else ()
    notes = [*kernels, *_notes(tried, refusals), *left_out]
    noted = exploration.noted(notes, seconds=seconds, tried=tried)
    others = certified(searched.spaces, asking.baselines())
    kept = replace(noted, spaces=task.base.spaces, points=points, others=others)
    return only_used_spaces(kept)


def _chosen(point: Point, old: CostTables, new: CostTables) -> _Chosen:
    """Return a point's choices as indices into other cost tables, which may list them in another order."""
    choice, options = {}, {}
    for variable, index, option in zip(old.variables, point.choice, point.options, strict=False):
        there, meant = new.of[variable.key], _meaning(old, variable, index)
        at = next(i for i in range(len(there.memory)) if _meaning(new, there, i) == meant)
        stored = variable.options[index] if variable.options else ()
        choice[variable.key] = at
        options[variable.key] = there.options[at].index(stored[option]) if stored else option
    return choice, options


def _meaning(tables: CostTables, variable: VariableTable, index: int) -> tuple[object, ...]:
    own = (each[index] for each in (variable.layouts, variable.kept, variable.again) if each)
    if variable.key.kind != "group":
        return tuple(own)
    return (*own, tables.templates[variable.key].choices[tables.position(variable.key, index)])


def _kinds(session: Session, searched: Searched) -> tuple[frozenset[str], dict[str, str]]:
    settings, groups = session.settings, len(searched.problem.graph.groups)
    kinds, refusals = set() if searched.refusal else {"sharded"}, {}
    equal = session.cluster.device_type == "cuda" and len(session.cluster.device_kinds) == 1
    beside = searched.parallelism if equal and not searched.refusal else None
    if reason := placed_refusal(settings.placements, groups, session.cluster.device_count, beside):
        refusals["placed plans"] = reason
    else:
        kinds.add("placed")
    # The conditions of the search for pipelines; besides, these methods know no constraints.
    suits = settings.pipelines != "never" and settings.constraints is None
    training = searched.problem.graph.atoms.graph.training and not searched.problem.refusal
    if suits and training and session.cluster.device_count > 1 and not searched.refusal:
        kinds.add("pipelined")
    return frozenset(kinds), refusals


def check_found(searched: Searched, exploration: Exploration) -> None:
    """Raise :class:`LackingDevicesError` if no sharded plan is possible and no planner found another plan."""
    if exploration.points:
        return
    tried = exploration.report.get("tried", {})
    refusals = dict.fromkeys(row["refusal"] for row in tried.values() if row["refusal"])
    notes = [note for note in exploration.report["notes"] if note.startswith("placed plans were not tried")]
    if exploration.settings["first"]:
        raise LackingDevicesError(f"no usual strategy: {'; '.join(refusals)}; leave out --first")
    why = "; ".join([*notes, *refusals]) or "no planner that places operators has a plan"
    given = exploration.settings["constraints"] is not None
    remedy = "take back or soften a constraint" if given else "leave out the devices of one type"
    raise LackingDevicesError(f"no sharded plan: {searched.refusal}; {why}; {remedy}")


def _against_constraints(task: PlanningTask) -> str:
    assert task.placed is not None
    try:
        return "; ".join(task.placed.limits.against)
    except TensorOptError as error:
        return str(error)


class _Asking:
    """The planners that have run, and the plans that they found.

    Attributes:
        task: the input of the planners.
        most_s: the CPU seconds that planners of placed plans may take together.
        found: the plans of all planners, without duplicates.
        left_out: the planners of placed plans that did not run, or not within all memory limits, because
            others had used up ``most_s``.
        refusals: why a planner has no plan, by its name.
    """

    def __init__(self, task: PlanningTask, most_s: float):
        self.task, self.most_s = task, most_s
        self._placing_s = 0.0
        self.found: dict[object, Point] = {}
        self.left_out: dict[str, None] = {}
        self._points: dict[str, list[Point]] = {}
        self.refusals: dict[str, str] = {}

    def ask(self, entry: Entry, limit: float | None = None) -> None:
        """Run a planner; with a limit in bytes per device, for its fastest plan within that memory."""
        self.take(entry.name, ())
        if entry.kind == "placed" and self._placing_s > self.most_s:
            self.left_out[entry.name] = None
            if limit is None:
                self.refusals[entry.name] = "other planners had used up the time for placing operators"
            return
        # Of this process, which others that run beside it do not lengthen.
        start = time.process_time()
        try:
            points = entry.points(self.task, limit, self.task.base.model.seed)
        except TensorOptError as refusal:
            if limit is None:
                self.refusals[entry.name] = str(refusal)
            points = ()
        self.take(entry.name, [each.point for each in points])
        if entry.kind == "placed":
            self._placing_s += time.process_time() - start

    def take(self, planner: str, points: Sequence[Point]) -> None:
        own = self._points.setdefault(planner, [])
        own += (self.found.setdefault(point.identity, point) for point in points)

    def notes(self) -> list[str]:
        if not self.left_out:
            return []
        return [
            f"planners of placed plans may take {self.most_s:.0f} s together, {share_words(SHARE)} of the "
            "exploration's time, so these were left out, or not run within all memory limits: "
            f"{', '.join(self.left_out)}; --placements always runs them"
        ]

    def baselines(self) -> tuple[Point, ...]:
        """Return the plans with which people compare (DDP, ZeRO, ...), even if points beat them. Of the
        heuristics, only plans that no other heuristic's plan beats are returned."""
        heuristics = [point for name in HEURISTICS for point in self._points.get(name, ())]
        others = [self._points.get(name, ()) for name in BASELINES if name not in HEURISTICS]
        return tuple(point for own in (*others, reduce_points(heuristics)) for point in own)

    def tried(self, entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
        """Return for each planner the number of its different plans and the fastest, or why it has none.

        For data parallelism, if batch norms exchange statistics, ``local_statistics_s`` is its fastest plan's
        step time with per-device statistics instead.
        """
        tried: dict[str, dict[str, Any]] = {}
        for name in (entry.name for entry in entries):
            points = {p.identity: p for p in self._points[name]}
            best = min(points.values(), key=lambda p: p.time_s, default=None)
            tried[name] = {
                "points": len(points),
                "memory_bytes": None if best is None else best.memory_bytes,
                "time_s": None if best is None else best.time_s,
                "refusal": self.refusals.get(name, ""),
            }
            if name == _DDP and best is not None and (local_s := local_statistics_s(self.task, best)):
                tried[name]["local_statistics_s"] = local_s
        return tried


def _asked_within_points(
    session: Session, searched: Searched, exploration: Exploration, asking: _Asking, entries: Sequence[Entry]
) -> tuple[tuple[Point, ...], list[str]]:
    """Return the exploration's points with the planners' plans that none of them beats, and a note if
    heuristics did not run within the memory of every point.

    Within a memory limit, heuristics find placements that they miss without one. So they also run within the
    memory of some points, including the leanest and the fastest, and within slightly less than the leanest's.
    A memory budget is never a limit: it only decides which points fit, and must not change what is found.
    """
    heuristics = [entry for entry in entries if entry.name in HEURISTICS]
    asked: set[float] = set()
    while True:
        points = reduce_points([*exploration.points, *certified(searched.spaces, [*asking.found.values()])])
        memory = [point.memory_bytes for point in points]
        limits = [limit for limit in (*(_LESS * m for m in memory[:1]), *memory) if limit not in asked]
        most = min(MOST_LIMITS + 1 - len(asked), len(limits))
        if most <= 0 or not heuristics:
            break
        chosen = [limits[i] for i in np.linspace(0, len(limits) - 1, most).round().astype(int).tolist()]
        for entry in heuristics:
            for limit in chosen:
                asking.ask(entry, limit)
        asked.update(chosen)
        session.progress(_STAGE, len(entries), len(entries), f"{len(asking.found)} plans of planners")
    note = (
        f"heuristics ran with the memory of {len(asked) - 1} of {len(points):,} points as their limit; with "
        "the memory of another point as the limit, they may find a better plan"
    )
    return unbeaten(points), [note] * bool(heuristics and limits)


def _notes(tried: dict[str, dict[str, Any]], refusals: dict[str, str]) -> list[str]:
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
