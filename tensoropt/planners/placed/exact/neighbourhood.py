"""A neighbourhood search (:mod:`..common.annealing`) after an exact planner's program.

Over blocks that run in one go the program knows few placements of a large graph. The search moves single
operators, from the program's answers and from the heuristics' placements, for the shortest step within the
devices' capacity. What it returns is faster than where it began: a heuristic's placement is never passed off
as its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.placement import PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.placement.flat import FlatProblem
from tensoropt.planners.placed.common.annealing import MoveTables, Shelf, State, anneal
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.exact.rounds import KnownPlacement, KnownPlacements
from tensoropt.planners.placed.local_search import TASKS_PER_SECOND

_FEWEST, _ENOUGH, _ENOUGH_PER_OPERATOR = 2_000, 20_000, 1_000
"""The fewest tries; and how many are enough, in all or for each operator."""
_SCOUTS, _AGAIN = 0.4, 4
"""The share of tries of the chains from the starting placements; and the number of chains after them, each
from the fastest placement so far, heated once more. Assumptions."""
_ROUNDS = 6
"""The most times that a chain runs with less room because the simulator finds more bytes than were booked."""


@dataclass
class SearchEffort:
    """The effort that a search spent.

    Attributes:
        tried: the placements whose step was computed.
        chains: the number of chains.
    """

    tried: int = 0
    chains: int = 0


def search(
    known: KnownPlacements, starts: Sequence[KnownPlacement], seed: int, seconds: float
) -> SearchEffort:
    """Search around the starting placements; ``known`` takes what is found.

    Args:
        seconds: the effort, in seconds of the machine where ``TASKS_PER_SECOND`` was measured.
    """
    chains = _Chains(known, seed, seconds)
    share = _SCOUTS / max(1, len(starts))
    for start in starts:
        chains.run(start, share)
    for _ in range(_AGAIN):
        # The fastest of all, a heuristic's included: from there the search still has to find something
        # faster.
        fastest = min((*known.fastest, *starts), key=_rank, default=None)
        if fastest is not None:
            chains.run(fastest, (1 - _SCOUTS) / _AGAIN)
    return chains.done


def _rank(known: KnownPlacement) -> tuple[float, float]:
    """Return the bytes above the devices' capacity, then the seconds."""
    return max(0.0, known.excess_bytes), known.simulated.time_s


class _Chains:
    """Annealing of one problem, without a cap but the devices' capacity."""

    def __init__(self, known: KnownPlacements, seed: int, seconds: float):
        self.known, self.seed, self.problem = known, seed, known.problem
        booked = _by_rule(self.problem, known.rules.alpha)
        self.flat, self.tables = FlatProblem.of(self.problem), MoveTables.of(booked, units_of(booked))
        self.caps = self.problem.devices.capacity_bytes.astype(float)
        tasks = self.problem.micro_batches * (
            (1 + self.problem.training) * self.problem.size + len(self.problem.tensors)
        )
        enough = max(_ENOUGH, _ENOUGH_PER_OPERATOR * self.problem.size)
        self.tries = int(np.clip(seconds * TASKS_PER_SECOND / tasks, _FEWEST, enough))
        self.done = SearchEffort()

    def run(self, start: KnownPlacement, share: float) -> None:
        """Run a chain, and once more with less room as long as its end does not fit when simulated."""
        state, before = State.of(start.simulated), start.simulated
        for _ in range(_ROUNDS):
            shelf = Shelf.empty(np.array([np.inf]), self.problem.size)
            self._anneal(state, shelf, share)
            if not np.isfinite(shelf.seconds[0]):  # nothing within the caps
                return
            state = shelf.state(0)
            simulated = simulate_placement(self.problem, state.placement(self.problem))
            if simulated.fits():
                if not before.fits() or simulated.time_s < before.time_s:
                    self.known.consider(simulated.placement, f"search from {_origin(start)}")
                return
            self._tighten(state, simulated)

    def _anneal(self, state: State, shelf: Shelf, share: float) -> None:
        tries = max(1, int(share * self.tries))
        self.done.chains, self.done.tried = self.done.chains + 1, self.done.tried + tries
        seed = (self.seed + self.done.chains) % 2**32
        anneal(self.flat, self.tables, state, self.caps, tries, seed, shelf)

    def _tighten(self, state: State, simulated: SimulatedPlacement) -> None:
        over = np.array(simulated.peak_bytes) - self.problem.devices.capacity_bytes
        booked = state.booked(self.tables, self.problem.devices.count)
        self.caps = np.where(over > 0, np.minimum(self.caps, booked - over), self.caps)


def _origin(start: KnownPlacement) -> str:
    """Return the source of a start; that of the first start if it was found by the search itself."""
    return start.source.removeprefix("search from ")


def _by_rule(problem: PlacementProblem, alpha: float | None) -> PlacementProblem:
    """Return the problem with the optimizer's state as the memory rule has it."""
    return problem if alpha is None else replace(problem, optimizer_bytes=alpha * problem.parameter_bytes)
