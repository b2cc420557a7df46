"""Search every space of an exploration, a mesh and a micro-batch count each, and let the judge play what was
found.

The search adds memory up, the judge takes the peak. Where much of that is what operators need while they run,
each space is searched again under caps on that (DESIGN section 6), and what the judge has seen of all these
frontiers is reduced to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.source import CostSource
from tensoropt.costs.tables import CostTables
from tensoropt.costs.working_sets import WorkingSets, working_sets
from tensoropt.errors import InfeasibleError
from tensoropt.plan.evaluate import CHUNK, Evaluation, costs_of, evaluate
from tensoropt.plan.exploration import Point, Space, reduce_points, unbeaten
from tensoropt.plan.problem import Settings
from tensoropt.search import CostGraph, NoStrategyError, TrackedFrontier, certify, track_frontier
from tensoropt.sharding.constraints import ConstraintError
from tensoropt.simulate.overlap import overlap_of
from tensoropt.types import Progress
from tensoropt.units import format_bytes


@dataclass(frozen=True)
class SearchedSpace:
    """Tables and frontiers of one mesh and micro-batch count.

    Attributes:
        frontier: of all strategies.
        capped: of those whose groups need no more than a cap while they run, by cap in bytes; None where no
            strategy keeps to it.
    """

    mesh: Mesh
    tables: CostTables
    frontier: TrackedFrontier
    communication: CommunicationModel
    capped: tuple[tuple[float, TrackedFrontier | None], ...] = ()

    @cached_property
    def frontiers(self) -> tuple[TrackedFrontier, ...]:
        """Of all searches that found something."""
        return (self.frontier, *(frontier for _, frontier in self.capped if frontier is not None))

    @cached_property
    def found(self) -> list[tuple[TrackedFrontier, int]]:
        """All points, each a frontier and its number there."""
        return [(frontier, i) for frontier in self.frontiers for i in range(len(frontier))]

    def additive(self, index: int) -> tuple[float, float]:
        """Memory and time of point ``index`` of :attr:`found`, as the search added them up."""
        frontier, own = self.found[index]
        return float(frontier.memory[own]), float(frontier.time[own])

    @property
    def notes(self) -> tuple[str, ...]:
        """What was heuristic in any of the searches, and under which caps there were several."""
        kept, lost = (
            ", ".join(format_bytes(cap) for cap, frontier in self.capped if (frontier is None) == none)
            for none in (False, True)
        )
        again = f"searched again under caps on what an operator needs: {kept}"
        nothing = f"no strategy keeps to a cap on what an operator needs of {lost}"
        return (
            *dict.fromkeys(note for frontier in self.frontiers for note in frontier.notes),
            *((again,) if kept else ()),
            *((nothing,) if lost else ()),
        )


def cost_graph(
    tables: CostTables, working: WorkingSets | None = None, cap_bytes: float = np.inf
) -> CostGraph:
    """The tables as the search takes them; without options that need more than a cap while they run."""
    graph = CostGraph()
    for variable in tables.variables:
        costs = variable.costs
        if working is not None and variable.key in working.of:
            above = (needed > cap_bytes for needed in working.of[variable.key])
            costs = [np.where(a[:, None], np.inf, c) for a, c in zip(above, costs, strict=True)]
        graph.add_operator(variable.key, costs)
    for edge in tables.edges:
        graph.add_edge(edge.a, edge.b, edge.table, rows=edge.rows, cols=edge.cols)
    return graph


def search_all(
    built: Sequence[tuple[Mesh, CostTables, CommunicationModel]], settings: Settings, progress: Progress
) -> tuple[list[SearchedSpace], tuple[str, ...]]:
    """(the frontiers, notes on spaces in which constraints leave no strategy)."""
    searched, refused = [], []
    for index, (mesh, tables, communication) in enumerate(built):
        progress("search", index, len(built), f"mesh {mesh.label}, {tables.mesh[0]} micro-batches")
        try:
            frontier = track_frontier(
                cost_graph(tables), epsilon=settings.epsilon, max_points=settings.max_points
            )
        except NoStrategyError as error:
            why = "nothing runs" if settings.constraints is None else "the constraints leave no strategy"
            refused.append(f"not searched: mesh {mesh.label}: {why} ({error})")
            continue
        capped = _capped(tables, frontier, settings)
        searched.append(SearchedSpace(mesh, tables, frontier, communication, capped))
    if not searched:
        said = "; ".join(dict.fromkeys(refused))
        if settings.constraints is None:
            raise InfeasibleError(
                f"{said}; where that is for lack of memory take a smaller batch, or price without timing: "
                "`tensoropt profiles --forget-failed`, then explore with --measure never"
            )
        raise ConstraintError(f"{said}; take back or soften one of them")
    progress("search", len(built), len(built), f"{sum(len(s.found) for s in searched)} points")
    return searched, tuple(dict.fromkeys(refused))


def _capped(
    tables: CostTables, frontier: TrackedFrontier, settings: Settings
) -> tuple[tuple[float, TrackedFrontier | None], ...]:
    """Frontiers under the caps that are worth it."""
    working = working_sets(tables)
    found: list[tuple[float, TrackedFrontier | None]] = []
    for cap in working.caps(frontier.strategy(0), frontier.options(0), float(frontier.memory[0])):
        graph = cost_graph(tables, working, cap)
        try:
            under = track_frontier(graph, epsilon=settings.epsilon, max_points=settings.max_points)
        except NoStrategyError:
            under = None
        found.append((cap, under))
    return tuple(found)


def judge_all(
    searched: Sequence[SearchedSpace],
    spaces: Sequence[Space],
    settings: Settings,
    costs: CostSource,
    progress: Progress,
) -> tuple[tuple[Point, ...], int]:
    """(what remains of all points once the judge has played them, how many were played)."""
    judged: list[list[Evaluation]] = []
    for number, found in enumerate(searched):
        progress("judge", number, len(searched), f"mesh {found.mesh.label}, {len(found.found)} points")
        chosen = [(frontier.strategy(i), frontier.options(i)) for frontier, i in found.found]
        overlap = overlap_of(costs.cluster, found.mesh)
        judged.append(evaluate(found.tables, chosen, overlap))
    figures = [costs_of(of_space) for of_space in judged]
    played = [(number, i) for number, of_space in enumerate(figures) for i in range(len(of_space))]
    kept = reduce_points(played, lambda item: tuple(figures[item[0]][item[1]]))
    points = [
        judged[number][index // CHUNK].point(
            index % CHUNK, spaces[number], number, additive=searched[number].additive(index)
        )
        for number, index in kept
    ]
    progress("judge", len(searched), len(searched), f"{len(points)} of {len(played)} points remain")
    return certified(searched, points), len(played)


def certified(searched: Sequence[SearchedSpace], points: Sequence[Point]) -> tuple[Point, ...]:
    """The points with what is proven of them over all spaces together; of placed ones nothing is.

    Under its cap or on its mesh a strategy may be the best, and yet another mesh's be better in the additive
    model. It stays where the judge prefers it, with the gap that it has.
    """
    sharded = [i for i, point in enumerate(points) if point.placed is None]
    memory = np.array([points[i].additive_memory_bytes for i in sharded])
    time_s = np.array([points[i].additive_time_s for i in sharded])
    gaps, exact = certify([s.frontier for s in searched], memory, time_s)
    found = list(points)
    for i, gap, proven in zip(sharded, gaps, exact, strict=True):
        found[i] = replace(points[i], exact=bool(proven), gap=float(gap))
    return unbeaten(found)
