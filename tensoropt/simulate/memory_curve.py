"""The memory of one strategy's step, moment by moment, taken from the recording of its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensoropt.costs.prices import free_prices
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.simulator import StepSimulator


@dataclass(frozen=True)
class _MemoryPoint:
    """Bytes alive at one moment, by kind."""

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    transient: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one step on the rank with the largest shards."""

    points: tuple[_MemoryPoint, ...]

    @property
    def peak(self) -> _MemoryPoint:
        """The point with the most bytes; the first of several."""
        return max(self.points, key=lambda p: p.total)


def memory_curve(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> MemoryCurve:
    """Return the memory curve of one strategy: one point for every moment at which something is computed or
    needed.

    Args:
        facts: by group name, the facts of its configuration.
    """
    candidates = StrategyCandidates(strategy, facts)
    batch = Batch(candidates, *candidates.row(), free_prices(strategy.graph, strategy.mesh, optimizer))
    recorder = StepRecorder()
    simulator = StepSimulator(batch, recorder)
    simulator.simulate()
    curve: list[_MemoryPoint] = []
    parameters, gradients, state = (int(x) for x in simulator.lasting[0])
    for at in recorder.moments:
        # Moments at which nothing is needed or computed only repeat the last point.
        if not at.workspace and at.moment.kind not in ("compute", "step"):
            continue
        words = at.moment.words
        point = _MemoryPoint(words, parameters, gradients, state, int(at.kept), int(at.transient))
        if curve and curve[-1].moment == words:  # parts of one group
            point = max(curve.pop(), point, key=lambda p: p.total)
        curve.append(point)
    return MemoryCurve(tuple(curve))
