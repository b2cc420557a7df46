"""Estimates beside the simulator's figures of the same strategies, tensors only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.estimate.known import Known
from tensoropt.estimate.strategies import CORE, FULL, NOTHING, AskedStep, UsualStrategy, peak
from tensoropt.evaluation.problem import Problem, prepare
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pinned import PinnedConfiguration, simulate_pinned
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.zoo import ZooModel

DEVICES = 4
USUAL = [
    *(
        UsualStrategy(data=DEVICES, stage=stage, recompute=r)
        for stage in (0, 1, 2, 3)
        for r in (NOTHING, FULL)
    ),
    *(UsualStrategy(tensor=DEVICES, recompute=r) for r in (NOTHING, FULL)),
    *(UsualStrategy(data=2, tensor=2, stage=stage) for stage in (0, 3)),
    UsualStrategy(data=DEVICES, recompute=CORE),
    *(UsualStrategy(recompute=r) for r in (NOTHING, FULL)),
]


class Beside(NamedTuple):
    """One strategy: both figures in bytes."""

    strategy: UsualStrategy
    estimated: float
    simulated: float

    @property
    def off(self) -> float:
        """How far the estimate is off, as a share."""
        return self.estimated / self.simulated - 1.0


def beside(
    known: Known, built: ZooModel, step: AskedStep, wanted: Sequence[UsualStrategy] = tuple(USUAL)
) -> Iterator[Beside]:
    """Yield the strategies that the model can be split by."""
    problem = prepare(capture(built.model, built.args, built.kwargs, dtype=step.dtype))
    for strategy in wanted:
        try:
            simulated = simulate(problem, step, strategy)
        except UnsuitableError:
            continue
        stays, moment = peak(known.model, step, strategy)
        yield Beside(strategy, sum(stays) + moment.kept + moment.working, simulated)


def simulate(problem: Problem, step: AskedStep, strategy: UsualStrategy) -> float:
    """Return the simulator's memory of a strategy, in bytes."""
    pinned = PinnedConfiguration(
        data=strategy.data, tensor=strategy.tensor, stage=strategy.stage, recompute=strategy.recompute,
        micro_batches=step.micro_batches,
    )  # fmt: skip
    settings = Settings(dtype=step.dtype, measure="never", optimizer=step.optimizer, process_memory=False)
    costs = CostSource(load_cluster(f"dgx-h100[{pinned.devices}]"), ProfileStore(":memory:"), settings)
    return simulate_pinned(problem, costs, pinned).point.memory_bytes
