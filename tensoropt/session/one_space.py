"""The search of one space, which has the strategies on one mesh at one micro-batch count.

The search ranks strategies by sums of costs. The simulator follows a step in time, and so ranks them slightly
differently. The two therefore alternate. First a coarse frontier (an outline) is found and simulated. Then
the full search looks only for strategies that may beat all simulated ones, given how far simulated costs in
this space deviate from the sums. Representatives of its results are simulated, and then the neighbours of the
best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.tables import CostTables
from tensoropt.frontier import representatives
from tensoropt.question.settings import Settings
from tensoropt.search import NoStrategyError, Staircase, TrackedFrontier, outline_frontier, track_frontier
from tensoropt.session.simulations import Simulated, Simulations
from tensoropt.types import Indices

_REPRESENTATIVES, _LOSS = 160, 2e-4
"""The most points of a frontier that are simulated first, fewer if the others would add at most this share of
hypervolume. These numbers and those below are assumptions."""
_LEANEST = 8
"""The number of unbeaten points of least memory to simulate, where sums and simulation differ most."""
_NEIGHBOURS = 3
"""The most points simulated in each gap between simulated points, if one near the gap is unbeaten."""
_REACH = 3
"""The number of simulated points on each side of a gap that count as near it. More than one, as the simulator
ranks points differently from the search."""
_ROUNDS = 8
"""The most rounds in which neighbours are simulated."""


@dataclass(eq=False)
class Found:
    """A frontier that a search found in one space (a mesh with a micro-batch count), simulated in part.

    Attributes:
        space: the index of the space.
        numbers: (n,) each point's index among the space's simulated strategies; -1 if it was not simulated.
    """

    space: int
    frontier: TrackedFrontier
    numbers: Indices = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = np.full(len(self.frontier), -1)

    def simulate(self, simulations: Simulations, indices: Indices) -> None:
        """Simulate those of the points ``indices`` that were not simulated yet."""
        _simulate_together([(self, indices)], simulations)

    def neighbours(self, won: Indices) -> Indices:
        """Return indices of points to simulate next, evenly spread over gaps between simulated points. Only
        gaps near an unbeaten point are filled.

        Args:
            won: the indices of the unbeaten strategies among the simulated ones.
        """
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
    """Simulate the points not simulated yet, with one call per space; return how many there were."""
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


def unbeaten_by(frontier: TrackedFrontier, rivals: Staircase | None) -> Indices:
    """Return the indices of the points that are faster than all rivals with no more memory."""
    if rivals is None:
        return np.arange(len(frontier))
    return np.flatnonzero(frontier.time < rivals.bounds(frontier.memory))


def first_look(found: Found, simulations: Simulations, rivals: Staircase | None = None) -> None:
    """Simulate some of the points that may beat the strategies known so far, spread over the frontier."""
    left = unbeaten_by(found.frontier, rivals)
    if not len(left):
        return
    part = Staircase(found.frontier.memory[left], found.frontier.time[left])
    chosen = np.union1d(representatives(part, _REPRESENTATIVES, _LOSS), np.arange(min(_LEANEST, len(left))))
    found.simulate(simulations, left[chosen])


def neighbours_of_winners(every: Sequence[Found], simulations: Simulations) -> Iterator[int]:
    """Simulate points next to the unbeaten ones, in rounds, until a round finds no new unbeaten strategy;
    yield the number of strategies simulated in each round."""
    for _ in range(_ROUNDS):
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


Built = tuple[Mesh, CostTables]
"""A mesh, and its cost tables for one micro-batch count."""


@dataclass(frozen=True)
class SearchedSpace:
    """The cost tables and the frontier of one mesh at one micro-batch count.

    Attributes:
        frontier: the frontier of all strategies or, if the settings allow a gap, of those that may beat the
            strategies known before the search; None if there was no search.
    """

    mesh: Mesh
    tables: CostTables
    frontier: TrackedFrontier | None

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks of the search, where it used heuristics."""
        return () if self.frontier is None else self.frontier.notes


@dataclass(frozen=True)
class SpacePart:
    """The results for one space, as a forked process returns them.

    Attributes:
        number: the index of the space.
        found: the frontier, of which some points were simulated; None if the space has no strategy.
        simulated: all strategies of the space that were simulated so far.
        refused: why the space has no strategy, in words; "" if it has one.
    """

    number: int
    found: Found | None
    simulated: Simulated
    refused: str = ""


def part_of(
    number: int, built: Built, settings: Settings, simulations: Simulations, threads: int, *, outline: bool
) -> SpacePart:
    """Search one space and, if the settings allow a gap, simulate some of the best strategies found.

    Args:
        number: the index of the space in ``simulations``, to which the simulated strategies are added.
        threads: the number of threads of the search.
        outline: whether to find a coarse frontier instead of all strategies that may beat the simulated ones.
    """
    mesh, tables = built
    rivals = simulations.rivals(number) if settings.allows_gap and not outline else None
    try:
        if outline:
            frontier = outline_frontier(tables, threads=threads)
        else:
            # Not thorough: the simulator decides, and a gap of the sums that is proven to a thousandth is not
            # worth as much time as all else together.
            frontier = track_frontier(
                tables,
                epsilon=settings.epsilon,
                method=settings.method,
                max_points=settings.max_points,
                threads=threads,
                rivals=rivals,
                thorough=False,
            )
    except NoStrategyError as error:
        why = "no strategy can run" if settings.constraints is None else "the constraints leave no strategy"
        # Other meshes may have strategies: only if none has is it an error.
        refused = f"not searched: mesh {mesh.label}: {why} ({error})"
        return SpacePart(number, None, simulations.spaces[number].done, refused)
    found = Found(number, frontier)
    if settings.allows_gap:
        first_look(found, simulations, rivals)
    return SpacePart(number, found, simulations.spaces[number].done)
