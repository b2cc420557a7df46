"""What a backward has alive that is taken apart: first the gradients of what a stage was given, later those
of its parameters.

PyTorch's schedules of that kind run autograd's graph twice. The first run keeps all that the second needs:
what forward kept, and the gradients of the results of operators that read parameters. What comes behind the
last of these operators is not needed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import local_shape
from tensoropt.plan.evaluate import Evaluation
from tensoropt.sharding.groups import Group
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.simulator import StepSimulator


@dataclass(frozen=True)
class SplitBackward:
    """Bytes of one micro-batch of a stage on one rank.

    Attributes:
        inputs_bytes: the most alive while the gradients of what arrived are made.
        between_bytes: kept until those of parameters are made.
        weights_bytes: the most alive while these are made.
    """

    inputs_bytes: float
    between_bytes: float
    weights_bytes: float


def split_backward(strategy: Strategy, evaluation: Evaluation) -> SplitBackward:
    """What the two parts of a stage's backward have alive; the stage is any but the first.

    Args:
        evaluation: of the strategy alone.
    """
    schedule = evaluation.batch.schedule
    simulator = StepSimulator(evaluation.batch)
    kept, transient = (np.cumsum(changes[:, 0]) for changes in (simulator.kept, simulator.transient))
    between = float(evaluation.metrics.parts.between_bytes[0])
    readers = [(group, size) for group in strategy.graph.groups if (size := waiting_bytes(strategy, group))]
    waiting, most, needed = 0.0, between, between
    for at in range(schedule.forward_end, schedule.last):
        moment = schedule.moments[at]
        group = strategy.graph.group_of[moment.group] if moment.group else None
        work = float(simulator.workspace[at, 0])
        if moment.kind == "compute" and group is not None:
            # The gradients of its parameters are not made now.
            work = max(work - sum(_weights(strategy, group)), 0.0)
        most = max(most, between + float(transient[at]) + work + waiting)
        if moment.kind == "compute" and group is not None and (size := waiting_bytes(strategy, group)):
            if not waiting:
                needed = float(kept[at])
            waiting += size
    left = needed + waiting
    # Operator by operator: the gradient that waited goes once those of its parameters are made and added.
    gone, weights = 0.0, left
    for group, size in readers:
        weights = max(weights, left - gone + max(_weights(strategy, group)))
        gone += size
    return SplitBackward(most, left, weights)


def _weights(strategy: Strategy, group: Group) -> list[float]:
    """Bytes of the gradient of each trained parameter that a group reads."""
    names = [n for n in (*group.parameters, *group.shared) if strategy.tensor(n).requires_grad]
    return [
        prod(local_shape(strategy.atoms(n), strategy.stored[n], strategy.mesh, None))
        * DTYPE_BYTES[strategy.tensor(n).stored_dtype]
        for n in names
    ]


def waiting_bytes(strategy: Strategy, group: Group) -> int:
    """Bytes of the gradients of a group's results that wait for those of its parameters to be made of them:
    of every operator that reads a parameter."""
    found = 0
    learning = {n for n in (*group.parameters, *group.shared) if strategy.tensor(n).requires_grad}
    for op in group.operators:
        if learning.intersection(op.inputs()):
            layouts = strategy.configurations[group.name].placed(
                op.name, strategy.graph.atoms, strategy.mesh, None
            )
            found += sum(
                prod(layouts.write_shape(number)) * strategy.tensor(name).element_bytes
                for number, name in enumerate(op.outputs)
            )
    return found
