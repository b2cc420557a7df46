"""A single space of an exploration, a mesh and a micro-batch count, searched and simulated in turns.

Search and simulation take turns: simulated strategies decide what is still worth a search.

The search adds up costs, the simulator follows the step in time, and the two rank strategies slightly
differently. So a space is outlined and its outline simulated before it is searched. The search then only
looks for strategies that may beat all simulated ones, given how far simulated costs in this space deviate
from the sums. Of its results, representatives are simulated, then the winners' neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.tables import CostTables
from tensoropt.frontier import representatives
from tensoropt.frontier.tools import Points
from tensoropt.question.settings import Settings
from tensoropt.search import (
    NoStrategyError,
    Staircase,
    TrackedFrontier,
    outline_frontier,
    track_frontier,
)
from tensoropt.session.simulations import Simulated, Simulations
from tensoropt.types import Indices

_REPRESENTATIVES, LOSS = 160, 2e-4
"""How many points of a frontier are simulated before their neighbours; fewer if the others would add at most
this share of hypervolume. Assumptions, as are the numbers below."""
_LEANEST = 8
"""How many of the leanest unbeaten points are simulated: there, simulated costs differ most from the sums."""
_NEIGHBOURS = 3
"""How many points are simulated between two simulated ones if a winner is near."""
_REACH = 3
"""How many simulated points away from a winner neighbours are still simulated, as the simulator ranks points
differently from the search."""
ROUNDS = 8
"""The most rounds in which neighbours are simulated."""


@dataclass(eq=False)
class Found:
    """A frontier of a space, and which of its points were simulated.

    Attributes:
        space: the number of the space.
        numbers: (n,) each point's number among the space's simulated strategies; -1 for the others.
    """

    space: int
    frontier: TrackedFrontier
    numbers: Indices = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = np.full(len(self.frontier), -1)

    def simulate(self, simulations: Simulations, indices: Indices) -> int:
        """Simulate the given points that were not simulated yet; return how many these were."""
        return _simulate_together([(self, indices)], simulations)

    def neighbours(self, won: Indices) -> Indices:
        """Return unsimulated points near the winners, whose numbers are ``won``, spread over each gap."""
        seen = np.flatnonzero(self.numbers >= 0)
        winners = np.isin(self.numbers[seen], won)
        found: list[int] = []
        ends = np.concatenate([[-1], seen, [len(self.numbers)]])
        # For each gap, whether one of the simulated points up to REACH to either side won.
        wins = np.concatenate([np.zeros(_REACH, bool), winners, np.zeros(_REACH, bool)])
        close = np.asarray(np.lib.stride_tricks.sliding_window_view(wins, 2 * _REACH).any(axis=1))
        for left, right, near in zip(ends, ends[1:], close.tolist(), strict=False):
            if near and right - left > 1:
                spread = np.linspace(left, right, min(_NEIGHBOURS, right - left - 1) + 2)[1:-1]
                found += np.unique(spread.round().astype(int)).tolist()
        return np.array([i for i in found if self.numbers[i] < 0], np.int64)


def _simulate_together(asked: Sequence[tuple[Found, Indices]], simulations: Simulations) -> int:
    """Simulate the given points of frontiers that were not simulated yet, all of a space at once; return how
    many these were."""
    of_space: dict[int, list[tuple[Found, Indices]]] = {}
    for found, indices in asked:
        new = indices[found.numbers[indices] < 0]
        if len(new):
            of_space.setdefault(found.space, []).append((found, new))
    for space, parts in of_space.items():
        numbers = simulations.spaces[space].add_all([(found.frontier, new) for found, new in parts])
        for (found, new), of_part in zip(parts, numbers, strict=True):
            found.numbers[new] = of_part
    return sum(len(new) for parts in of_space.values() for _, new in parts)


def unbeaten_by(frontier: TrackedFrontier, rivals: Points | None) -> Indices:
    """Return the points of a frontier that no rival beats."""
    if rivals is None or not len(rivals.memory):
        return np.arange(len(frontier))
    best = np.append(np.inf, rivals.time)[np.searchsorted(rivals.memory, frontier.memory, side="right")]
    return np.flatnonzero(frontier.time < best)


def first_look(found: Found, simulations: Simulations, rivals: Points | None = None) -> int:
    """Simulate representatives of the points that no rival beats; return how many."""
    left = unbeaten_by(found.frontier, rivals)
    if not len(left):
        return 0
    part = Staircase(found.frontier.memory[left], found.frontier.time[left])
    chosen = np.union1d(representatives(part, _REPRESENTATIVES, LOSS), np.arange(min(_LEANEST, len(left))))
    return found.simulate(simulations, left[chosen])


def neighbours_of_winners(every: Sequence[Found], simulations: Simulations) -> Iterator[int]:
    """Simulate neighbours of the unbeaten strategies in rounds, as long as a round finds new unbeaten ones;
    yield how many were simulated in each."""
    for _ in range(ROUNDS):
        best = simulations.frontier()
        won = [best.origin[best.origin[:, 0] == space, 1] for space in range(len(simulations.spaces))]
        count = _simulate_together(
            [(found, found.neighbours(won[found.space])) for found in every], simulations
        )
        if not count:
            return
        yield count
        after = simulations.frontier()
        if np.array_equal(after.memory, best.memory) and np.array_equal(after.time, best.time):
            return


Built = tuple[Mesh, CostTables, CommunicationModel]
"""A mesh, its tables for a micro-batch count, and the model that prices its communication."""


@dataclass(frozen=True)
class SearchedSpace:
    """The tables and the frontier of one mesh and micro-batch count.

    Attributes:
        frontier: the frontier of all strategies or, if a gap is allowed, of those that may beat the known
            ones; None if the space was not searched.
    """

    mesh: Mesh
    tables: CostTables
    frontier: TrackedFrontier | None
    communication: CommunicationModel

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on heuristics in the search."""
        return () if self.frontier is None else self.frontier.notes


@dataclass(frozen=True)
class SpacePart:
    """The results for one space, as another process sends them.

    Attributes:
        number: the number of the space.
        frontier: the frontier; None if there is no strategy.
        every: all frontiers found, each with the numbers of its simulated points.
        simulated: all strategies of the space that were simulated, now or before.
        refused: why there is no strategy, in words.
    """

    number: int
    frontier: TrackedFrontier | None
    every: Sequence[Found]
    simulated: Simulated
    refused: str


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

    def outline(self) -> SpacePart:
        """Outline the space, and simulate its best points."""
        try:
            outline = outline_frontier(self.tables, threads=self.threads)
        except NoStrategyError as error:
            self._refuse(error)
            return self._part(None)
        self._add(outline, None)
        return self._part(outline)

    def search(self) -> SpacePart:
        """Search the space for strategies that may beat the simulated ones."""
        rivals = self.simulations.rivals(self.number) if self.settings.allows_gap else None
        try:
            # Not thorough: the simulator decides, and a gap of the sums that is proven to a thousandth is not
            # worth as much time as all else together.
            frontier = track_frontier(
                self.tables,
                epsilon=self.settings.epsilon,
                method=self.settings.method,
                max_points=self.settings.max_points,
                threads=self.threads,
                rivals=rivals,
                thorough=False,
            )
        except NoStrategyError as error:
            self._refuse(error)
            return self._part(None)
        self._add(frontier, rivals)
        return self._part(frontier)

    def _part(self, frontier: TrackedFrontier | None) -> SpacePart:
        simulated = self.simulations.spaces[self.number].done
        return SpacePart(self.number, frontier, self.every, simulated, self.refused)

    def _add(self, frontier: TrackedFrontier, rivals: Staircase | None) -> None:
        self.every.append(Found(self.number, frontier))
        if self.settings.allows_gap:
            first_look(self.every[-1], self.simulations, rivals)

    def _refuse(self, error: NoStrategyError) -> None:
        why = "nothing runs" if self.settings.constraints is None else "the constraints leave no strategy"
        # Other meshes may have strategies: only if none has is it an error.
        self.refused = f"not searched: mesh {self.mesh.label}: {why} ({error})"


def comes_close(found: Found, simulations: Simulations, best: Points, share: float) -> bool:
    """Return whether none of the best beats some simulated strategy of a frontier whose memory and time are
    reduced by a share, or increased if the share is negative."""
    own = simulations.spaces[found.space].simulated
    memory, time_s = (1.0 - share) * own[found.numbers[found.numbers >= 0]].T
    rival = np.append(np.inf, best.time)[np.searchsorted(best.memory, memory, side="right")]
    return bool((time_s < rival).any())
