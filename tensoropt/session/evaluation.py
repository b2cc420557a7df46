"""What the searches found, simulated: no strategy is shown by the figures that found it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensoropt.costs.tables import CostTables
from tensoropt.errors import InfeasibleError
from tensoropt.plan.evaluate import CHUNK, Evaluation, costs_of, evaluate, space_of
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import Point, reduce_points, unbeaten
from tensoropt.plan.recorded import Recorded, record
from tensoropt.plan.space import Space
from tensoropt.search import certify
from tensoropt.session.run_report import run_report, versions
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.session.spaces import SearchedSpace
from tensoropt.simulate.overlap import overlap_of
from tensoropt.types import Progress
from tensoropt.units import format_bytes


def evaluate_searched(session: Session, searched: Searched, model: ModelInfo) -> Exploration:
    """The exploration: of all strategies found, simulated, those that no other beats.

    Raises:
        InfeasibleError: none fits the budget of the settings.
    """
    with session.clock.stage("judge"):  # the name under which saved explorations keep these seconds
        spaces = tuple(space_of(searched.problem, s.mesh, s.tables, s.notes) for s in searched.spaces)
        points, simulated = simulate_all(searched, spaces, session.progress)
        recorded = record_used(searched, spaces, points)
    _check_budget(points, session.settings.memory_bytes)
    return Exploration(
        points=points,
        spaces=spaces,
        model=model,
        cluster=session.cluster.to_dict(),
        settings=session.settings.to_dict(),
        versions=versions(),
        report=run_report(searched, session.clock.seconds, simulated),
        recorded=recorded,
    )


def simulate_all(
    searched: Searched, spaces: Sequence[Space], progress: Progress
) -> tuple[tuple[Point, ...], int]:
    """The points that none beats once all strategies found were simulated, and how many were simulated."""
    evaluations: list[list[Evaluation]] = []
    count = len(searched.spaces)
    for number, found in enumerate(searched.spaces):
        progress("simulate", number, count, f"mesh {found.mesh.label}, {len(found.found)} points")
        chosen = [(frontier.strategy(i), frontier.options(i)) for frontier, i in found.found]
        overlap = overlap_of(searched.costs.cluster, found.mesh)
        evaluations.append(evaluate(found.tables, chosen, overlap))
    # Strategies are reduced as figures; points, with their collectives, are made of the few that remain.
    figures = [costs_of(of_space) for of_space in evaluations]
    simulated = [(number, i) for number, of_space in enumerate(figures) for i in range(len(of_space))]
    kept = reduce_points(simulated, lambda item: tuple(figures[item[0]][item[1]]))
    points = [
        evaluations[number][index // CHUNK].point(
            index % CHUNK, spaces[number], number, additive=searched.spaces[number].additive(index)
        )
        for number, index in kept
    ]
    progress("simulate", count, count, f"{len(points)} of {len(simulated)} points remain")
    return certified(searched.spaces, points), len(simulated)


def certified(searched: Sequence[SearchedSpace], points: Sequence[Point]) -> tuple[Point, ...]:
    """The points with what is proven of them over all spaces together; of placed ones nothing is.

    Under its cap or on its mesh a strategy may be the best, and yet another mesh's be better in the additive
    model. It stays where the simulator prefers it, with the gap that it has.
    """
    sharded = [i for i, point in enumerate(points) if point.placed is None]
    memory = np.array([points[i].additive_memory_bytes for i in sharded])
    time_s = np.array([points[i].additive_time_s for i in sharded])
    gaps, exact = certify([s.frontier for s in searched], memory, time_s)
    found = list(points)
    for i, gap, proven in zip(sharded, gaps, exact, strict=True):
        found[i] = replace(points[i], exact=bool(proven), gap=float(gap))
    return unbeaten(found)


def record_used(searched: Searched, spaces: Sequence[Space], points: Sequence[Point]) -> Recorded | None:
    """The operator graph and the costs that these points use, as they are saved with an exploration."""
    return record(searched.problem.graph.atoms.graph, _used(searched.spaces, spaces, points))


def _used(
    searched: Sequence[SearchedSpace], spaces: Sequence[Space], points: Sequence[Point]
) -> Iterator[tuple[CostTables, Mapping[str, int]]]:
    """Of each sharded point the tables it is from, and its choice by name."""
    for point in points:
        if point.placed is not None:
            continue
        names = spaces[point.space].variables
        yield searched[point.space].tables, dict(zip(names, point.choice, strict=True))


def _check_budget(points: Sequence[Point], memory_bytes: float | None) -> None:
    if memory_bytes is not None and points[0].memory_bytes > memory_bytes:
        raise InfeasibleError(
            f"no plan fits {format_bytes(memory_bytes)}; the smallest plan needs "
            f"{format_bytes(points[0].memory_bytes)}"
        )
