"""The heuristics' placements of a problem, from which other planners start."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.errors import UnsuitableError

_WARM_STARTS = ("m_topo", "m_etf", "m_sct", "dpos")
"""Heuristics whose placements are tried; the others place by rules alone, or change the graph."""
_SCHEDULERS = ("m_etf", "dpos")
"""Heuristics that order operators well once their devices are fixed."""


def heuristics(problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    """Yield placements of a problem: all operators on one device, for each that can run them, then those of
    the heuristics that do not refuse."""
    count = problem.devices.count
    for device in range(count):
        placement = Placement.in_order([device] * problem.size, count)
        # in_order ignores pins, and which operators a device can run.
        if possible(problem, placement):
            yield placement
    for name in _WARM_STARTS:
        yield from _method(name, problem, seed)


def scheduled(problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    """Yield the placements of those heuristics that order operators well."""
    for name in _SCHEDULERS:
        yield from _method(name, problem, seed)


def _method(name: str, problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    try:
        answer = importlib.import_module(f"tensoropt.planners.placed.{name}").place(problem, None, seed)
    except (InfeasibleError, UnsuitableError):  # anything else is a fault, which a warm start must not hide
        return
    yield answer.placement


def possible(problem: PlacementProblem, placement: Placement) -> bool:
    """Return whether every device can run its operators, and every operator lies where it is pinned."""
    return all(problem.allowed[o, d] for o, d in enumerate(placement.device))
