"""Search and simulation in turns: simulated strategies decide what is still worth a search.

The search sums costs, the simulator steps through them, and the two order strategies slightly differently. So
a space is outlined and its outline simulated before it is searched: its search only has to find what all
simulated strategies leave room for, given how much the space's own simulated strategies differ from their
sums. Of what a search finds, representatives are simulated, and then the neighbours of those that won.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.frontier import representatives
from tensoropt.frontier.tools import Points
from tensoropt.search import Staircase, TrackedFrontier
from tensoropt.session.simulations import Simulations
from tensoropt.types import Indices

OUTLINED = 48
"""The points of an outline that are simulated. An assumption, as are the numbers below."""
REPRESENTATIVES, LOSS = 160, 2e-4
"""The points of a frontier that are simulated before their neighbours; fewer are enough if the others would
add at most this share of hypervolume."""
LEANEST = 8
"""How many of the leanest points that no rival beats are simulated: what the simulator adds to the sums
differs most there."""
NEIGHBOURS = 3
"""The points that are simulated between two simulated ones, one of which won."""
REACH = 3
"""How many simulated points away from a winner neighbours are still tried: the simulator's order is not the
search's."""
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
        """Simulate those of the points that were not simulated yet; return how many these were."""
        return simulate_together([(self, indices)], simulations)

    def neighbours(self, won: Indices) -> Indices:
        """Return points not simulated yet near those whose numbers ``won``, spread evenly over each gap."""
        seen = np.flatnonzero(self.numbers >= 0)
        winners = np.isin(self.numbers[seen], won)
        found: list[int] = []
        ends = np.concatenate([[-1], seen, [len(self.numbers)]])
        # For each gap, whether one of the simulated points up to REACH to either side won.
        wins = np.concatenate([np.zeros(REACH, bool), winners, np.zeros(REACH, bool)])
        close = np.asarray(np.lib.stride_tricks.sliding_window_view(wins, 2 * REACH).any(axis=1))
        for left, right, near in zip(ends, ends[1:], close.tolist(), strict=False):
            if near and right - left > 1:
                spread = np.linspace(left, right, min(NEIGHBOURS, right - left - 1) + 2)[1:-1]
                found += np.unique(spread.round().astype(int)).tolist()
        return np.array([i for i in found if self.numbers[i] < 0], np.int64)


def simulate_together(asked: Sequence[tuple[Found, Indices]], simulations: Simulations) -> int:
    """Simulate those points of some frontiers that were not simulated yet, each space's together; return how
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
    """Simulate representatives of what no rival beats; return how many."""
    left = unbeaten_by(found.frontier, rivals)
    if not len(left):
        return 0
    part = Staircase(found.frontier.memory[left], found.frontier.time[left])
    chosen = np.union1d(representatives(part, REPRESENTATIVES, LOSS), np.arange(min(LEANEST, len(left))))
    return found.simulate(simulations, left[chosen])


def neighbours_of_winners(every: Sequence[Found], simulations: Simulations) -> Iterator[int]:
    """Simulate, round after round, neighbours of what no other simulated strategy beats, as long as that
    finds something unbeaten; yield how many were simulated."""
    for _ in range(ROUNDS):
        best = simulations.frontier()
        won = [best.origin[best.origin[:, 0] == space, 1] for space in range(len(simulations.spaces))]
        count = simulate_together(
            [(found, found.neighbours(won[found.space])) for found in every], simulations
        )
        if not count:
            return
        yield count
        after = simulations.frontier()
        if np.array_equal(after.memory, best.memory) and np.array_equal(after.time, best.time):
            return
