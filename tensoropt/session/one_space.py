"""A single space of an exploration, a mesh and a micro-batch count, searched and simulated in turns.

The search sums memory, while the simulator takes the peak. If much of the sum is what operators need while
they run, a space is searched once more under caps on that, to find strategies whose sum is larger but whose
peak is smaller.
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
from tensoropt.costs.working_sets import working_sets
from tensoropt.frontier.tools import Points
from tensoropt.plan.settings import Settings
from tensoropt.search import (
    CostGraph,
    NoStrategyError,
    Staircase,
    TrackedFrontier,
    outline_frontier,
    track_frontier,
)
from tensoropt.session.simulations import Simulated, Simulations
from tensoropt.session.turns import Found, first_look, unbeaten_by
from tensoropt.units import format_bytes

CLOSE = 0.01
"""A space is searched under a cap if some strategy under it would be beaten by none if it needed less memory
and time by this share; an assumption."""

Built = tuple[Mesh, CostTables, CommunicationModel]
"""A mesh, its tables for a micro-batch count, and the model that prices its communication."""


@dataclass(frozen=True)
class SearchedSpace:
    """The tables and frontiers of one mesh and micro-batch count.

    Attributes:
        frontier: the frontier of all strategies or, if a gap is allowed, of those that known strategies leave
            room for.
        capped: the frontiers of those whose groups need no more than a cap while they run, by cap in bytes;
            None if no strategy fits.
    """

    mesh: Mesh
    tables: CostTables
    frontier: TrackedFrontier
    communication: CommunicationModel
    capped: tuple[tuple[float, TrackedFrontier | None], ...] = ()

    @cached_property
    def frontiers(self) -> tuple[TrackedFrontier, ...]:
        """The frontiers of all searches that found something."""
        return (self.frontier, *(frontier for _, frontier in self.capped if frontier is not None))

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on what was heuristic in any of the searches, and under which caps there were several."""
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


@dataclass(frozen=True)
class SpacePart:
    """The results for one space, as another process sends them.

    Attributes:
        number: the number of the space.
        frontier: the frontier; None if there is no strategy.
        capped: the frontiers under caps, as in :class:`SearchedSpace`.
        every: all frontiers found, with which of their points were simulated.
        simulated: all strategies of the space that were simulated, now or before.
        refused: why there is no strategy, in words.
        took_s: the seconds it took.
    """

    number: int
    frontier: TrackedFrontier | None
    capped: tuple[tuple[float, TrackedFrontier | None], ...]
    every: Sequence[Found]
    simulated: Simulated
    refused: str
    took_s: float


class OneSpace:
    """The search of one space.

    Args:
        number: the number of the space in ``simulations``, to which it adds.
        threads: the threads of the search; one per core by default.
    """

    def __init__(
        self,
        number: int,
        built: Built,
        settings: Settings,
        simulations: Simulations,
        threads: int | None = None,
    ):
        self.number, self.settings, self.simulations, self.threads = number, settings, simulations, threads
        self.mesh, self.tables, self.communication = built
        self.every: list[Found] = []
        self.refused = ""
        self._began = time.monotonic()

    @property
    def allows_gap(self) -> bool:
        """Whether strategies may be left out that are hardly better than what is known."""
        return self.settings.epsilon > 0

    def outline(self) -> SpacePart:
        """Outline the space, and simulate its best points."""
        return self._part(self._outline(self.tables))

    def search(self, outline: TrackedFrontier | None) -> SpacePart:
        """Search the space for what simulated strategies leave room for, also under caps.

        Args:
            outline: the space's outline, if it was outlined.
        """
        rivals = self.simulations.rivals(self.number) if self.allows_gap else None
        frontier = self._track(self.tables, rivals)
        if frontier is None:
            return self._part(None)
        return self._part(frontier, self._capped(frontier, outline, rivals))

    def _part(
        self,
        frontier: TrackedFrontier | None,
        capped: tuple[tuple[float, TrackedFrontier | None], ...] = (),
    ) -> SpacePart:
        simulated, took_s = self.simulations.spaces[self.number].done, time.monotonic() - self._began
        return SpacePart(self.number, frontier, capped, self.every, simulated, self.refused, took_s)

    def _outline(self, graph: CostGraph) -> TrackedFrontier | None:
        """Return the outline of a graph of the space, simulated; None if there is no strategy."""
        try:
            outline = outline_frontier(graph, threads=self.threads)
        except NoStrategyError as error:
            self._refuse(error)
            return None
        self._add(outline, None)
        return outline

    def _add(self, frontier: TrackedFrontier, rivals: Staircase | None) -> None:
        self.every.append(Found(self.number, frontier))
        if self.allows_gap:
            first_look(self.every[-1], self.simulations, rivals)

    def _track(self, graph: CostGraph, rivals: Staircase | None) -> TrackedFrontier | None:
        """Return a frontier of the space, with representatives of it simulated; None if there is no
        strategy."""
        try:
            # Not thorough: the simulator decides, and a gap of the sums that is proven to a thousandth is not
            # worth as much time as all else together.
            frontier = track_frontier(
                graph,
                epsilon=self.settings.epsilon,
                max_points=self.settings.max_points,
                threads=self.threads,
                rivals=rivals,
                thorough=False,
            )
        except NoStrategyError as error:
            self._refuse(error)
            return None
        self._add(frontier, rivals)
        return frontier

    def _capped(
        self, frontier: TrackedFrontier, outline: TrackedFrontier | None, rivals: Staircase | None
    ) -> tuple[tuple[float, TrackedFrontier | None], ...]:
        """Return the frontier under each cap worth searching; None if no strategy fits."""
        # If known strategies leave this space no room, they leave none under a cap either.
        if rivals is not None and not len(unbeaten_by(frontier, rivals)):
            return ()
        working = working_sets(self.tables)
        found: list[tuple[float, TrackedFrontier | None]] = []
        # Point 0 is the leanest: caps below what it needs are what could make a leaner peak. Of a frontier
        # that rivals have pruned the leanest may be missing; an outline begins with it.
        lean = outline if outline is not None else frontier
        for cap in working.caps(lean.strategy(0), lean.options(0), float(lean.memory[0])):
            # A cap without any strategy is no reason to refuse the space.
            graph, before = self.tables.restricted(working.within(cap)), self.refused
            under = self._outline(graph) if self.allows_gap else None
            # What the outline's best strategies are far from is not worth more than the outline.
            best = self.simulations.frontier()
            if under is not None and not comes_close(self.every[-1], self.simulations, best, CLOSE):
                found.append((cap, under))
                continue
            rivals = self.simulations.rivals(self.number, capped=True) if self.allows_gap else None
            found.append((cap, self._track(graph, rivals)))
            self.refused = before
        return tuple(found)

    def _refuse(self, error: NoStrategyError) -> None:
        why = "nothing runs" if self.settings.constraints is None else "the constraints leave no strategy"
        # Other meshes may have strategies: only if none has is it an error.
        self.refused = f"not searched: mesh {self.mesh.label}: {why} ({error})"


def comes_close(found: Found, simulations: Simulations, best: Points, share: float) -> bool:
    """Return whether some simulated strategy of a frontier is not beaten by any of the best, or would not be
    if it needed less by a share; or more, if the share is negative."""
    own = simulations.spaces[found.space].simulated
    memory, time_s = (1.0 - share) * own[found.numbers[found.numbers >= 0]].T
    rival = np.append(np.inf, best.time)[np.searchsorted(best.memory, memory, side="right")]
    return bool((time_s < rival).any())
