"""The judge: one step of a strategy, followed moment by moment.

:func:`simulate` gives the memory curve of one strategy; :mod:`tensoropt.plan.evaluate` plays whole frontiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Play
from tensoropt.simulate.candidates import StrategyMenu
from tensoropt.simulate.simulator import Walk


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes alive at one moment, by kind."""

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    transient: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class Simulation:
    """Memory curve of one step on the rank with the largest shards."""

    curve: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        return max(self.curve, key=lambda p: p.total)


def simulate(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> Simulation:
    """The memory curve of one strategy. ``facts``: per group name the facts of its configuration."""
    menu = StrategyMenu(strategy, facts)
    return Simulation(tuple(memory_curve(Play(menu, *menu.row(), optimizer, None))))


def memory_curve(play: Play) -> list[MemoryPoint]:
    """What is alive at every moment at which something happens, of a play of one strategy."""
    walk = Walk(play)
    found: list[MemoryPoint] = []
    parameters, gradients, optimizer = (int(x) for x in walk.held[0])
    for number, moment in enumerate(play.course.moments):
        spot = int(np.sum(walk.step(number)))
        if spot or moment.kind in ("compute", "step"):
            kept, transient = (int(x) for x in walk.alive[0])
            point = MemoryPoint(moment.words, parameters, gradients, optimizer, kept, transient + spot)
            if found and found[-1].moment == point.moment:  # parts of one group
                point = max(found.pop(), point, key=lambda p: p.total)
            found.append(point)
    return found
