"""The heuristics' placements of a problem, from which other planners start."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.errors import UnsuitableError
from tensoropt.units import format_seconds

_WARM_STARTS = ("m_topo", "m_etf", "m_sct", "dpos")
"""Heuristics whose placements are tried; the others place by rules alone, or change the graph."""


_SCHEDULERS = ("m_etf", "dpos")
"""Heuristics that order operators well once their devices are fixed."""


def heuristics(problem: PlacementProblem, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield the heuristics' placements of a problem, and each device alone; heuristics that refuse are left
    out."""
    count = problem.devices.count
    for device in range(count):
        placement = Placement.in_order([device] * problem.size, count)
        # in_order asks neither for pins nor for what a device can run.
        if possible(problem, placement):
            yield f"device {device} alone", placement
    for name in _WARM_STARTS:
        yield from _method(name, problem, seed)


def fastest_heuristic(problem: PlacementProblem, seed: int) -> tuple[str, SimulatedPlacement] | None:
    """Return the heuristics' fastest placement that fits, and the heuristic; None if none fits."""
    simulated = (
        (name, simulate_placement(problem, placement)) for name, placement in heuristics(problem, seed)
    )
    fitting = [(name, each) for name, each in simulated if each.fits()]
    return min(fitting, key=lambda pair: pair[1].time_s, default=None)


def faster_heuristic(problem: PlacementProblem, seed: int, time_s: float) -> str:
    """Return a note that names a heuristic whose placement is faster than ``time_s``; "" if there is none."""
    fastest = fastest_heuristic(problem, seed)
    if fastest is None or fastest[1].time_s >= time_s:
        return ""
    return f"{fastest[0]} is faster: {format_seconds(fastest[1].time_s)}"


def scheduled(problem: PlacementProblem, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of those heuristics that order operators well."""
    for name in _SCHEDULERS:
        yield from _method(name, problem, seed)


def _method(name: str, problem: PlacementProblem, seed: int) -> Iterator[tuple[str, Placement]]:
    try:
        answer = importlib.import_module(f"tensoropt.planners.placed.{name}").place(problem, None, seed)
    except (InfeasibleError, UnsuitableError):  # anything else is a fault, which a warm start must not hide
        return
    yield name, answer.placement


def possible(problem: PlacementProblem, placement: Placement) -> bool:
    """Return whether every device can run its operators, and every operator lies where it is pinned."""
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    everywhere = np.isfinite([seconds[o, d] for o, d in enumerate(placement.device)]).all()
    return bool(everywhere) and all(placement.device[o] in allowed for o, allowed in problem.pinned)
