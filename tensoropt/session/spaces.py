"""The spaces of an exploration, a mesh and a micro-batch count each, searched one after the other.

The search adds memory up, while the simulator takes the peak. Where much of the sum is what operators need
while they run, each space is searched again under caps on that, so that strategies are found whose sum is
larger and whose peak is smaller; what the simulator has seen of all these frontiers is reduced to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.tables import CostTables
from tensoropt.costs.working_sets import WorkingSets, working_sets
from tensoropt.errors import InfeasibleError
from tensoropt.plan.settings import Settings
from tensoropt.search import CostGraph, NoStrategyError, TrackedFrontier, track_frontier
from tensoropt.sharding.constraints import ConstraintError
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
    """The tables as the search takes them, without options that need more than a cap while they run."""
    graph = CostGraph()
    for variable in tables.variables:
        costs = variable.costs
        if working is not None and variable.key in working.of:
            above = (needed > cap_bytes for needed in working.of[variable.key])
            # An infinite cost forbids an option without changing indices, so that points of all searches
            # share a catalogue.
            costs = [np.where(a[:, None], np.inf, c) for a, c in zip(above, costs, strict=True)]
        graph.add_operator(variable.key, costs)
    for edge in tables.edges:
        graph.add_edge(edge.a, edge.b, edge.table, rows=edge.rows, cols=edge.cols)
    return graph


def search_all(
    built: Sequence[tuple[Mesh, CostTables, CommunicationModel]], settings: Settings, progress: Progress
) -> tuple[list[SearchedSpace], tuple[str, ...]]:
    """The frontiers of all spaces, and notes on those in which constraints leave no strategy.

    Args:
        built: per space its mesh, its tables and what prices its communication.

    Raises:
        InfeasibleError, ConstraintError: no space has a strategy; says what to take back.
    """
    searched, refused = [], []
    for index, (mesh, tables, communication) in enumerate(built):
        progress("search", index, len(built), f"mesh {mesh.label}, {tables.mesh[0]} micro-batches")
        try:
            frontier = track_frontier(
                cost_graph(tables), epsilon=settings.epsilon, max_points=settings.max_points
            )
        except NoStrategyError as error:
            why = "nothing runs" if settings.constraints is None else "the constraints leave no strategy"
            # Other meshes may have strategies: only if none has is it an error.
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
    """Per cap worth searching under the frontier there, None where no strategy keeps to it."""
    working = working_sets(tables)
    found: list[tuple[float, TrackedFrontier | None]] = []
    # Point 0 is the leanest: caps below what it needs are what could make a leaner peak.
    for cap in working.caps(frontier.strategy(0), frontier.options(0), float(frontier.memory[0])):
        graph = cost_graph(tables, working, cap)
        try:
            under = track_frontier(graph, epsilon=settings.epsilon, max_points=settings.max_points)
        except NoStrategyError:
            under = None
        found.append((cap, under))
    return tuple(found)
