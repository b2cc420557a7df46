"""The best placement of a small problem by trying all of them, the simulator as oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from tensoropt.errors import PlanError
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement


def best_play(
    problem: PlacementProblem, allowed: Callable[[tuple[int, ...]], bool] = lambda device: True
) -> SimulatedPlacement | None:
    """The fastest that fits, over allowed devices × orders; None when nothing fits."""
    found = [simulated for simulated in every_placement(problem, allowed) if simulated.fits()]
    return min(found, key=lambda simulated: simulated.time_s, default=None)


def every_placement(
    problem: PlacementProblem, allowed: Callable[[tuple[int, ...]], bool]
) -> Iterator[SimulatedPlacement]:
    count = problem.devices.count
    after = {False: _later(problem, back=False), True: _later(problem, back=True)}
    for device in filter(allowed, product(range(count), repeat=problem.size)):
        mine = [[o for o, d in enumerate(device) if d == k] for k in range(count)]
        forwards = product(*(list(_orders(ops, after[False])) for ops in mine))
        backwards = list(product(*(list(_orders(ops, after[True])) for ops in mine)))
        for forward in forwards:
            for backward in backwards if problem.training else [()]:
                try:
                    yield simulate_placement(problem, Placement(device, forward, backward))
                except PlanError:  # orders that wait for each other
                    continue


def _orders(operators: Sequence[int], later: list[set[int]]) -> Iterator[tuple[int, ...]]:
    if not operators:
        yield ()
    for first in operators:
        others = [o for o in operators if o != first]
        if not any(first in later[o] for o in others):
            for rest in _orders(others, later):
                yield (first, *rest)


def _later(problem: PlacementProblem, *, back: bool) -> list[set[int]]:
    """Per operator those that must come after it."""
    later: list[set[int]] = [set() for _ in problem.names]
    for o in range(problem.size) if back else reversed(range(problem.size)):
        tensors = [problem.tensors[t] for t in (problem.read if back else problem.made)[o]]
        next_ones = (
            {t.producer for t in tensors if t.gradient} if back else {r for t in tensors for r in t.readers}
        )
        later[o] = next_ones.union(*(later[n] for n in next_ones))
    return later
