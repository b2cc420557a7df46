"""Placements by fast heuristics (m-TOPO, m-ETF, m-SCT, DPOS), from which other planners start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed import dpos, m_etf, m_sct, m_topo
from tensoropt.planners.placed.common.units import PlacedAnswer

_WARM_STARTS = (m_topo.place, m_etf.place, m_sct.place, dpos.place)
"""Heuristics whose placements are tried. The others place by rules alone, or change the graph."""
_SCHEDULERS = (m_etf.place, dpos.place)
"""Heuristics that order operators well once their devices are fixed."""
_Method = Callable[[PlacementProblem, float | None, int], PlacedAnswer]


def heuristics(problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    """Yield, for each device that can run all operators, the placement of everything on it. Then yield the
    placements of the heuristics that find one.
    """
    count = problem.devices.count
    for device in range(count):
        placement = Placement.in_order([device] * problem.size, count)
        # in_order ignores pins, and which operators a device can run.
        if possible(problem, placement):
            yield placement
    yield from _placed(_WARM_STARTS, problem, seed)


def scheduled(problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    """Yield the placements of the heuristics that order operators best: m-ETF and DPOS."""
    yield from _placed(_SCHEDULERS, problem, seed)


def _placed(methods: Iterable[_Method], problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    for place in methods:
        # Anything else is a fault, which a warm start must not hide.
        with suppress(InfeasibleError, UnsuitableError):
            yield place(problem, None, seed).placement


def possible(problem: PlacementProblem, placement: Placement) -> bool:
    """Return whether every operator is on a device that has its kernels and that its pins, if any, allow."""
    return all(problem.allowed[o, d] for o, d in enumerate(placement.device))
