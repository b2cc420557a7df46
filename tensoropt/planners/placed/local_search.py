"""Local search: improve the heuristics' placements by annealing, under many caps on memory.

Annealing (:mod:`.common.annealing`) starts from the placements of the heuristics, first without a cap on
memory. Then it runs under lower and lower caps, each time from the fastest placement within the cap, which is
the epsilon constraint method (Y. Haimes et al., *IEEE Trans. Syst. Man Cybern.* 1, 1971). The result is all
placements that no other beats in memory and time when simulated.

The number of tries is limited, not the seconds, so that a result depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.placement.flat import FlatProblem
from tensoropt.placement.prices import PricedGraph
from tensoropt.plan.point import reduce_points
from tensoropt.planners.placed.common.annealing import MoveTables, Shelf, State, anneal
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.common.units import PlacedAnswer, limited, units_of
from tensoropt.types import Floats
from tensoropt.units import format_bytes

_TASKS_PER_SECOND = 25e6
"""The tasks simulated per second on one core of an AMD EPYC (measured), which turn seconds into tries."""
_SHELVES = 48
"""The number of memory levels for which a placement is stored."""
_CAPS = 8
"""The number of memory caps under which a chain runs."""
_FEWEST, _ENOUGH, _ENOUGH_PER_OPERATOR = 2_000, 20_000, 1_000
"""The fewest tries of a search. The most are ``_ENOUGH``, or if that is more ``_ENOUGH_PER_OPERATOR`` for
each operator."""
_STARTS = 3
_SCOUTS, _FASTEST, _CAPPED = 0.3, 0.3, 0.4
"""The number of fastest starts from which a chain runs, and the shares of all tries for these chains, for
chains without a cap, and for chains under caps. These and the numbers above are assumptions."""
_ROUNDS = 6
"""The most times that caps are lowered because the simulator finds more memory than was booked."""


@dataclass(frozen=True, kw_only=True)
class LocalSearch:
    """The settings of the planner.

    Attributes:
        seconds: the effort in seconds on the machine where ``_TASKS_PER_SECOND`` was measured.
    """

    seconds: float = 20.0


DEFAULTS = LocalSearch()


class _Search:
    def __init__(self, problem: PlacementProblem, seed: int, settings: LocalSearch):
        self.problem, self.seed = problem, seed
        units = units_of(problem)
        self.flat, self.tables = FlatProblem.of(problem), MoveTables.of(problem, units)
        self.caps = problem.devices.capacity_bytes.astype(float)
        total = self.tables.all_bytes
        least = max(total / problem.devices.count, float(self.tables.bytes.max(initial=0.0)))
        # A byte more, as sums are rounded.
        self.shelf = Shelf.empty(np.linspace(least, total, _SHELVES) * (1 + 1e-9) + 1, problem.size)
        tasks = problem.micro_batches * ((1 + problem.training) * problem.size + len(problem.tensors))
        enough = max(_ENOUGH, _ENOUGH_PER_OPERATOR * problem.size)
        self.tries = int(np.clip(settings.seconds * _TASKS_PER_SECOND / tasks, _FEWEST, enough))
        self.chains = self.tried = 0

    def run(self, starts: Sequence[SimulatedPlacement]) -> None:
        states = {s.placement.device: State.of(s) for s in sorted(starts, key=lambda s: s.time_s)}
        # By bytes above the caps, then by time, as the sort is stable.
        ordered = sorted(states.values(), key=self._over)
        start = ordered[0]
        for state in ordered[:_STARTS]:
            self._chain(state.copy(), self.caps, _SCOUTS / _STARTS)
        self._chain(self._fastest(start), self.caps, _FASTEST / 2)
        known, edges = self.shelf.unbeaten(), self.shelf.edges
        most = edges[known[-1]] if known else edges[-1]
        for cap in np.linspace(most, edges[0], _CAPS + 1)[1:]:
            self._chain(self._fastest(start, cap), np.minimum(self.caps, cap), _CAPPED / _CAPS)
        self._chain(self._fastest(start), self.caps, _FASTEST / 2)

    def tighten(self, simulated: SimulatedPlacement) -> None:
        over, start = simulated.excess_bytes, State.of(simulated)
        booked = start.booked(self.tables, self.problem.devices.count)
        self.caps = np.where(over > 0, np.minimum(self.caps, booked - over), self.caps)
        self.shelf = Shelf.empty(self.shelf.edges, self.problem.size)
        self._chain(start, self.caps, _CAPPED / _CAPS)

    def simulated(self) -> list[SimulatedPlacement]:
        states = (self.shelf.state(number) for number in self.shelf.unbeaten())
        return [simulate_placement(self.problem, state.placement(self.problem)) for state in states]

    def _chain(self, state: State, caps: Floats, share: float) -> None:
        tries = max(1, int(share * self.tries))
        self.chains, self.tried = self.chains + 1, self.tried + tries
        anneal(self.flat, self.tables, state, caps, tries, (self.seed + self.chains) % 2**32, self.shelf)

    def _fastest(self, start: State, cap: float = np.inf) -> State:
        """Return the fastest known state within a memory cap, else that of least memory, else ``start``."""
        known = self.shelf.unbeaten()
        within = [number for number in known if self.shelf.edges[number] <= cap]
        return self.shelf.state((within or known[:1])[-1]) if known else start.copy()

    def _over(self, state: State) -> float:
        booked = state.booked(self.tables, self.problem.devices.count)
        return float(np.maximum(booked - self.caps, 0.0).sum())


def placements(
    graph: PricedGraph, memory_limit_bytes: float | None, seed: int, settings: LocalSearch = DEFAULTS
) -> list[tuple[PricedGraph, PlacedAnswer]]:
    """Return the non-dominated placements found that fit the memory, each with the given graph.

    Raises:
        InfeasibleError: no placement found fits.
    """
    kept, notes = simulated_places("local_search", graph.problem, memory_limit_bytes, seed, settings)
    return [(graph, PlacedAnswer(simulated.placement, notes)) for simulated in kept]


def simulated_places(
    name: str,
    problem: PlacementProblem,
    memory_limit_bytes: float | None,
    seed: int,
    settings: LocalSearch,
    known: Iterable[Placement] = (),
) -> tuple[Sequence[SimulatedPlacement], tuple[str, ...]]:
    """Return (the non-dominated simulated placements, ascending in memory; notes on the search).

    Args:
        name: the planner's name, for messages.
        known: placements from which to start; by default those of the heuristics.

    Raises:
        InfeasibleError: no placement found fits.
    """
    problem = limited(problem, memory_limit_bytes)
    starts = [*known] or [*heuristics(problem, seed)] or [_anywhere(problem)]
    begun = [simulate_placement(problem, placement) for placement in starts]
    search = _Search(problem, seed, settings)
    search.run(begun)
    found = [*begun, *search.simulated()]
    for _ in range(_ROUNDS):
        if any(simulated.fits() for simulated in found):
            break
        search.tighten(min(found, key=_excess_bytes))
        found += search.simulated()
    kept = reduce_points(
        [simulated for simulated in found if simulated.fits()], lambda s: (s.memory_bytes, s.time_s)
    )
    if not kept:
        capacity = format_bytes(problem.devices.in_all(float(problem.devices.capacity_bytes.max())))
        raise InfeasibleError(
            f"{name} finds no plan within {capacity} on {problem.devices.count} devices; the nearest "
            f"placement needs {format_bytes(min(map(_excess_bytes, found)))} more on one device; raise the "
            "limit, use more devices or a smaller batch"
        )
    gap = max(0.0, 1 - lower_bound_s(problem) / kept[-1].time_s)
    proof = f"proven: no step is more than {gap:.2%} shorter (bound: critical path, or equal work)"
    return kept, (f"{search.tried:,} placements tried in {search.chains} annealing chains", proof)


def _anywhere(problem: PlacementProblem) -> Placement:
    """Return the start if no heuristic finds one: each unit on the first device that is allowed."""
    units = units_of(problem)
    return Placement.in_order((int(units.allowed[unit].argmax()) for unit in units.of), problem.devices.count)


def _excess_bytes(simulated: SimulatedPlacement) -> float:
    return float(simulated.excess_bytes.max())
