"""Functions that turn simulated strategies into points, with proofs, and collect the costs to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from tensoropt.costs.source import CostSource
from tensoropt.evaluation.evaluate import space_of
from tensoropt.exploration.exploration import Exploration
from tensoropt.frontier import knee, representatives
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import Point, by_strategy, unbeaten
from tensoropt.plan.recorded import CostRecorder, Recorded
from tensoropt.plan.space import Space
from tensoropt.question.settings import Settings
from tensoropt.report.rebuilt import strategy_on
from tensoropt.search import certify
from tensoropt.session.one_space import SearchedSpace
from tensoropt.session.run_report import run_report, versions
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.session.simulations import unbeaten_of

SHOWN, LOSS = 300, 1e-3
"""The number of points shown if a gap is allowed, and the share of the frontier's hypervolume that the points
left out may be worth; more are shown if they would be worth more."""


def evaluate_searched(session: Session, searched: Searched, model: ModelInfo) -> Exploration:
    """Return the exploration whose points are the simulated strategies that no other beats."""
    with session.clock.stage("judge"):
        spaces = tuple(space_of(searched.problem, s.mesh, s.tables, s.notes) for s in searched.spaces)
        points = _chosen_points(searched, spaces, session.settings)
    simulated = sum(len(of_space.simulated) for of_space in searched.simulations)
    report = run_report(searched, session.clock.seconds)
    if simulated:
        session.progress("simulate", 1, 1, f"{len(points)} of {simulated} points remain")
    if not searched.spaces:
        report["notes"].append(f"no sharded plan: {searched.refusal}")
        report["sharded_refusal"] = searched.refusal
    return Exploration(
        points=points,
        spaces=spaces,
        model=model,
        cluster=session.cluster.to_dict(),
        settings=session.settings.to_dict(),
        versions=versions(),
        report=report,
    )


def _chosen_points(searched: Searched, spaces: Sequence[Space], settings: Settings) -> tuple[Point, ...]:
    simulations = searched.simulations
    if not any(len(its.simulated) for its in simulations):
        return ()
    best = unbeaten_of(simulations)
    chosen = np.arange(len(best.memory))
    if settings.allows_gap:
        chosen = representatives(best, SHOWN, LOSS, keep=(knee(best),))
    origin = best.origin[chosen]
    points: dict[int, Point] = {}
    for space, its in enumerate(simulations):
        own = np.flatnonzero(origin[:, 0] == space)
        points |= zip(own.tolist(), its.points(origin[own, 1], spaces[space], space), strict=True)
    return certified(searched.spaces, [points[i] for i in range(len(chosen))])


def certified(searched: Sequence[SearchedSpace], points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with ``exact`` and ``gap`` as proven against all strategies of all searched meshes.

    Proofs are about sums of costs. A point whose sums another strategy beats still stays on the frontier,
    with its gap, if no other point beats it as simulated. Placed and pipelined points get no proof, nor do
    points if nothing was searched.
    """
    frontiers = [space.frontier for space in searched if space.frontier is not None]
    sharded = sorted(row for rows in by_strategy(points)[0].values() for row in rows)
    if not sharded or not frontiers:
        return unbeaten(points)
    memory = np.array([points[i].additive_memory_bytes for i in sharded])
    time_s = np.array([points[i].additive_time_s for i in sharded])
    gaps, exact = certify(frontiers, memory, time_s)
    found = list(points)
    for i, gap, proven in zip(sharded, gaps, exact, strict=True):
        found[i] = points[i].changed(exact=proven, gap=gap)
    return unbeaten(found)


def only_used_spaces(exploration: Exploration) -> Exploration:
    """Return the exploration without unused and repeated ``spaces`` (a mesh with a micro-batch count each) of
    pipelines and placed plans. The indices of spaces in its points are adjusted."""
    needed = {point.space for point in (*exploration.points, *exploration.others)}
    kept: list[Space] = []
    number: dict[int, int] = {}
    for n, space in enumerate(exploration.spaces):
        # Searched spaces have groups, and are identified by their place. Pipelines' and placed plans' have
        # none, and those of planners that ran twice are equal.
        if not space.groups and n not in needed:
            continue
        at = kept.index(space) if not space.groups and space in kept else len(kept)
        kept += [space] if at == len(kept) else []
        number[n] = at
    return replace(
        exploration,
        spaces=tuple(kept),
        points=tuple(p.changed(space=number[p.space]) for p in exploration.points),
        others=tuple(p.changed(space=number[p.space]) for p in exploration.others),
    )


def record_used(session: Session, searched: Searched, exploration: Exploration) -> Recorded | None:
    """Return the operator graph and all costs that the exploration's points use, for saving."""
    points = (*exploration.points, *exploration.others)
    rows, records = by_strategy(points)
    graph = searched.problem.graph
    with ExitStack() as stack:
        costs = open_costs(session, searched, stack) if records else searched.costs
        recorder = CostRecorder(graph, costs)
        for space, of_space in rows.items():
            tables, names = searched.spaces[space].tables, exploration.spaces[space].variables
            for row in of_space:
                recorder.add_tables(tables, dict(zip(names, points[row].choice, strict=True)))
        for row in records:
            strategy_on(exploration.plan(points[row]), graph, session.cluster).record(recorder)
        return recorder.recorded()


def open_costs(session: Session, searched: Searched, stack: ExitStack) -> CostSource:
    """Return the search's source of costs, with profile store and ranks open until ``stack`` closes."""
    store = stack.enter_context(session.open_store())
    pool = stack.enter_context(session.open_ranks())
    return searched.costs.reopened(store, pool)
