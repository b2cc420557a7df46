"""The starting points of exact planners: the heuristics' placements of a problem."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.exact.rules import Rules, lasting_units, obeys

WARM_STARTS = ("m_topo", "m_etf", "m_sct", "dpos")
"""Heuristics whose placements are tried; the others place by rules alone, or change the graph."""


SCHEDULERS = ("m_etf", "dpos")
"""Heuristics that order operators well once their devices are fixed."""


MOST_CUTS = 3
"""How many ways to cut a problem in two are tried, the most even ones; an assumption."""


def heuristics(problem: PlacementProblem, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield the heuristics' placements of a problem, and each device alone; heuristics that refuse are left
    out."""
    count = problem.devices.count
    for device in range(count):
        placement = Placement.in_order([device] * problem.size, count)
        # in_order asks neither for pins nor for what a device can run.
        if _possible(problem, placement):
            yield f"device {device} alone", placement
    for name in WARM_STARTS:
        yield from _method(name, problem, seed)


def starts(problem: PlacementProblem, rules: Rules, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield the starting points of an exact planner: the heuristics' placements, and some made to obey a
    balance."""
    yield from heuristics(problem, seed)
    if rules.balance is not None and problem.devices.count == 2:
        yield from halves(problem, rules, seed)


def ordered(problem: PlacementProblem, device: tuple[int, ...], seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield orders of execution for operators whose devices are fixed."""
    # Pinning every operator leaves a heuristic nothing to choose but the order.
    fixed = replace(problem, pinned=tuple((o, (d,)) for o, d in enumerate(device)))
    for name in SCHEDULERS:
        yield from _method(name, fixed, seed)


def halves(problem: PlacementProblem, rules: Rules, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield placements with the first operators on device 0 and the others on device 1, in the most even ways
    that obey the rules.

    The heuristics know nothing of a balance, so possibly none of their placements obeys it.
    """
    units = units_of(problem)
    cuts = []
    for first in range(1, len(units.members)):
        device = tuple(int(unit >= first) for unit in units.of)
        if _possible(problem, Placement.in_order(device, 2)) and obeys(problem, device, rules):
            cuts.append((int(lasting_units(problem, device, rules).max()), device))
    for _, device in sorted(cuts)[:MOST_CUTS]:
        for source, placement in ordered(problem, device, seed):
            yield f"two halves, ordered by {source}", placement


def _method(name: str, problem: PlacementProblem, seed: int) -> Iterator[tuple[str, Placement]]:
    try:
        answer = importlib.import_module(f"tensoropt.planners.placed.{name}").place(problem, None, seed)
    except (InfeasibleError, UnsuitableError):  # anything else is a fault, which a warm start must not hide
        return
    yield name, answer.placement


def _possible(problem: PlacementProblem, placement: Placement) -> bool:
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    everywhere = np.isfinite([seconds[o, d] for o, d in enumerate(placement.device)]).all()
    return bool(everywhere) and all(placement.device[o] in allowed for o, allowed in problem.pinned)
