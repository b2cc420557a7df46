"""The spaces of an exploration, a mesh and a micro-batch count each, searched and simulated in turns.

The search adds memory up, while the simulator takes the peak. Where much of the sum is what operators need
while they run, each space is searched again under caps on that, so that strategies are found whose sum is
larger and whose peak is smaller; what the simulator has seen of all these frontiers is reduced to one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.tables import CostTables
from tensoropt.costs.working_sets import WorkingSets, working_sets
from tensoropt.errors import InfeasibleError
from tensoropt.frontier.tools import Points
from tensoropt.plan.settings import Settings
from tensoropt.search import (
    TOO_LARGE,
    CostGraph,
    NoStrategyError,
    Staircase,
    TrackedFrontier,
    outline_frontier,
    track_frontier,
)
from tensoropt.session.remaining import Remaining, outlined_s
from tensoropt.session.simulations import Simulations
from tensoropt.session.turns import Found, first_look, neighbours_of_winners, unbeaten_by
from tensoropt.sharding.constraints import ConstraintError
from tensoropt.types import Progress
from tensoropt.units import format_bytes

CLOSE = 0.01
"""By how much less memory and time a strategy under a cap would have to need to be beaten by none, for the
space to be searched under that cap; an assumption."""

TRIFLE = 1e-3
"""By how much less memory or time a strategy has to need for its space to bring something new; what an
exploration may lose anyway."""

Built = tuple[Mesh, CostTables, CommunicationModel]
"""A mesh, the tables of it and of a micro-batch count, and what prices its communication."""


@dataclass(frozen=True)
class SearchedSpace:
    """Tables and frontiers of one mesh and micro-batch count.

    Attributes:
        frontier: of all strategies; of those that known ones leave room for, where a gap is allowed.
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


class SpaceSearch:
    """All spaces of an exploration, searched.

    Args:
        simulations: of the same spaces, in the same order; filled here.
    """

    def __init__(
        self,
        built: Sequence[Built],
        settings: Settings,
        simulations: Simulations,
        progress: Progress,
        remaining: Remaining | None = None,
    ):
        self.built, self.settings, self.simulations = list(built), settings, simulations
        self.progress = progress
        self.remaining = remaining if remaining is not None else Remaining()
        self.found: dict[int, SearchedSpace] = {}
        self.refused: dict[int, str] = {}
        self.every: list[Found] = []
        self.outlines: dict[int, TrackedFrontier] = {}
        self.outlines_s: dict[int, float] = {}

    @property
    def allows_gap(self) -> bool:
        """Whether strategies may be left out that are hardly better than what is known."""
        return self.settings.epsilon > 0

    def search(self) -> None:
        """Fill ``found`` with the spaces that have strategies, by number; those of their points that are
        worth it are simulated.

        Raises:
            InfeasibleError, ConstraintError: no space has a strategy; says what to take back.
        """
        self._expect(range(len(self.built)))
        order = self._outlined() if self.allows_gap else range(len(self.built))
        for done, number in enumerate(order):
            self._expect(order[done:])
            self._report(len(self.built) - len(order) + done, number)
            self._search(number)
        self._expect([])
        if not self.found:
            raise self._nothing()
        points = sum(len(frontier) for space in self.found.values() for frontier in space.frontiers)
        self.progress("search", len(self.built), len(self.built), f"{points} points")

    def add(self, built: Built) -> bool:
        """Outline one more space, and search it if a simulated strategy of the outline needs less than any
        that is known by more than a trifle; whether one does."""
        number = len(self.built)
        self.built.append(built)
        before = self.simulations.frontier()
        self.simulations.add(*built[:2])
        outline = self._outline(number, cost_graph(built[1]))
        if outline is None:
            return False
        if not self.allows_gap:
            first_look(self.every[-1], self.simulations)
        self.outlines[number] = outline
        self._expect([number])
        self._report(number, number)
        if self._comes_close(self.every[-1], before, -TRIFLE):
            self._search(number)
            self._expect([])
            return True
        self._expect([])
        mesh, tables, communication = built
        self.found[number] = SearchedSpace(mesh, tables, outline, communication)
        return False

    def _search(self, number: int) -> None:
        """Search a space for what simulated strategies leave room for, also under caps."""
        mesh, tables, communication = self.built[number]
        if self._is_too_large(number):
            self.found[number] = SearchedSpace(mesh, tables, self.outlines[number], communication)
            return
        rivals = self.simulations.rivals(number) if self.allows_gap else None
        frontier = self._track(number, cost_graph(tables), rivals)
        if frontier is not None:
            capped = self._capped(number, frontier, rivals)
            self.found[number] = SearchedSpace(mesh, tables, frontier, communication, capped)

    def simulate(self) -> None:
        """Simulate what is left: everything, or neighbours of what won."""
        if self.allows_gap:
            for done, count in enumerate(neighbours_of_winners(self.every, self.simulations)):
                self.progress("simulate", done, done + 2, f"{count} neighbours of the best")
        else:
            for done, found in enumerate(self.every):
                self.progress("simulate", done, len(self.every), f"{len(found.frontier)} points")
                found.simulate(self.simulations, np.arange(len(found.frontier)))

    def _expect(self, left: Sequence[int]) -> None:
        """Say how long the searches of these spaces will take."""
        seconds = (
            outlined_s(self.built[number][1], self.outlines_s.get(number, 0.0))
            for number in left
            if not self._is_too_large(number)
        )
        self.remaining.expect("searches", sum(seconds))

    def _is_too_large(self, number: int) -> bool:
        """Whether a space's outline is all that a search of it would find."""
        return number in self.outlines and TOO_LARGE in self.outlines[number].notes

    def _report(self, done: int, number: int) -> None:
        mesh, tables, _ = self.built[number]
        self.progress("search", done, len(self.built), f"mesh {mesh.label}, {tables.mesh[0]} micro-batches")

    def _outlined(self) -> list[int]:
        """The spaces that have strategies, the most promising first, with their outlines simulated."""
        for number, (_, tables, _) in enumerate(self.built):
            self._report(0, number)
            began = time.monotonic()
            outline = self._outline(number, cost_graph(tables))
            self.outlines_s[number] = time.monotonic() - began
            if outline is not None:
                self.outlines[number] = outline
        if not self.outlines:
            return []
        best = self.simulations.frontier().origin[:, 0]
        left = [number for number in range(len(self.built)) if number not in self.refused]
        # What is found first prunes the other searches.
        return sorted(left, key=lambda number: (-int((best == number).sum()), number))

    def _outline(self, number: int, graph: CostGraph) -> TrackedFrontier | None:
        """The outline of a graph of a space, simulated; None where there is no strategy."""
        try:
            outline = outline_frontier(graph)
        except NoStrategyError as error:
            self._refuse(number, error)
            return None
        self._add(Found(number, outline), None)
        return outline

    def _comes_close(self, found: Found, best: Points, share: float) -> bool:
        """Whether some simulated strategy of a frontier is not beaten by any of the best, or would not be if
        it needed less by a share; more, where the share is negative."""
        own = self.simulations.spaces[found.space].simulated
        memory, time_s = (1.0 - share) * own[found.numbers[found.numbers >= 0]].T
        rival = np.append(np.inf, best.time)[np.searchsorted(best.memory, memory, side="right")]
        return bool((time_s < rival).any())

    def _add(self, found: Found, rivals: Staircase | None) -> None:
        self.every.append(found)
        if self.allows_gap:
            first_look(found, self.simulations, rivals)

    def _track(self, number: int, graph: CostGraph, rivals: Staircase | None) -> TrackedFrontier | None:
        """A frontier of a space, representatives of it simulated; None where there is no strategy."""
        try:
            # Not thorough: the simulator decides, and a gap of the sums that is proven to a thousandth is not
            # worth as much time as all else together.
            frontier = track_frontier(
                graph,
                epsilon=self.settings.epsilon,
                max_points=self.settings.max_points,
                rivals=rivals,
                thorough=False,
            )
        except NoStrategyError as error:
            self._refuse(number, error)
            return None
        self._add(Found(number, frontier), rivals)
        return frontier

    def _capped(
        self, number: int, frontier: TrackedFrontier, rivals: Staircase | None
    ) -> tuple[tuple[float, TrackedFrontier | None], ...]:
        """Per cap worth searching under the frontier there, None where no strategy keeps to it."""
        # Where known strategies leave this space no room, they leave none under a cap.
        if rivals is not None and not len(unbeaten_by(frontier, rivals)):
            return ()
        tables = self.built[number][1]
        working = working_sets(tables)
        found: list[tuple[float, TrackedFrontier | None]] = []
        # Point 0 is the leanest: caps below what it needs are what could make a leaner peak. Of a frontier
        # that rivals have pruned the leanest may be missing; an outline begins with it.
        lean = self.outlines.get(number, frontier)
        for cap in working.caps(lean.strategy(0), lean.options(0), float(lean.memory[0])):
            # Nothing under a cap is no reason to refuse the space.
            graph, before = cost_graph(tables, working, cap), dict(self.refused)
            outline = self._outline(number, graph) if self.allows_gap else None
            # What the outline's best strategies are far from is not worth more than the outline.
            best = self.simulations.frontier()
            if outline is not None and not self._comes_close(self.every[-1], best, CLOSE):
                found.append((cap, outline))
                continue
            rivals = self.simulations.rivals(number, capped=True) if self.allows_gap else None
            found.append((cap, self._track(number, graph, rivals)))
            self.refused = before
        return tuple(found)

    def _refuse(self, number: int, error: NoStrategyError) -> None:
        why = "nothing runs" if self.settings.constraints is None else "the constraints leave no strategy"
        # Other meshes may have strategies: only if none has is it an error.
        self.refused[number] = f"not searched: mesh {self.built[number][0].label}: {why} ({error})"

    @property
    def notes(self) -> tuple[str, ...]:
        """The spaces without strategies, in words."""
        return tuple(dict.fromkeys(self.refused.values()))

    def _nothing(self) -> InfeasibleError | ConstraintError:
        said = "; ".join(self.notes)
        if self.settings.constraints is None:
            return InfeasibleError(
                f"{said}; where that is for lack of memory take a smaller batch, or price without timing: "
                "`tensoropt profiles --forget-failed`, then explore with --measure never"
            )
        return ConstraintError(f"{said}; take back or soften one of them")
