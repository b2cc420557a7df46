"""The memory of a backward that is taken apart: first the gradients of a stage's inputs, later those of its
parameters.

PyTorch's schedules of that kind run autograd's graph twice. The first run keeps all that the second needs:
what forward kept, and the gradients of the results of operators that read parameters. What comes after the
last of these operators is not needed a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from tensoropt.graph import Operator
from tensoropt.ops.layouts import local_shape
from tensoropt.plan.evaluate import Evaluation
from tensoropt.sharding.groups import Group
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.simulator import StepSimulator


@dataclass(frozen=True)
class SplitBackward:
    """The bytes of one micro-batch of a stage on one rank during a split backward.

    Attributes:
        inputs_bytes: the most bytes alive while the gradients of what arrived are made.
        between_bytes: the bytes kept until the gradients of parameters are made.
        weights_bytes: the most bytes alive while these are made.
    """

    inputs_bytes: float
    between_bytes: float
    weights_bytes: float


def split_backward(strategy: Strategy, evaluation: Evaluation) -> SplitBackward:
    """Return the bytes alive in the two parts of the backward of a stage, which is any but the first.

    Args:
        evaluation: the evaluation of this strategy alone.
    """
    schedule = evaluation.batch.schedule
    simulator = StepSimulator(evaluation.batch)
    kept, transient = (np.cumsum(changes[:, 0]) for changes in (simulator.kept, simulator.transient))
    between = float(evaluation.metrics.parts.between_bytes[0])
    of_group, weights_of = waiting_bytes(strategy), _weights(strategy)
    groups = {group.name: group for group in strategy.graph.groups}
    waiting, most, needed = 0.0, between, between
    of_parameters = _of_parameters_alone(strategy)
    for at in range(schedule.forward_end, schedule.last):
        moment = schedule.moments[at]
        group = groups.get(moment.group)
        work = float(simulator.workspace[at, 0])
        if moment.kind == "compute" and group is not None:
            # The gradients of its parameters are made later.
            work = max(work - sum(weights_of.get(group.name, ())), 0.0)
        if group is not None and group.name in of_parameters:
            continue  # it has no part in the gradients of what arrived
        most = max(most, between + float(transient[at]) + work + waiting)
        if moment.kind == "compute" and group is not None and (size := of_group.get(group.name)):
            if not waiting:
                needed = float(kept[at]) - _kept_behind(strategy, evaluation, group)
            waiting += size
    left = needed + waiting
    # Operator by operator: a waiting gradient is freed once those of its parameters are made and added.
    gone, weights = 0.0, left
    for name, size in of_group.items():
        weights = max(weights, left - gone + max(weights_of[name]))
        gone += size
    return SplitBackward(most, left, weights)


def _kept_behind(strategy: Strategy, evaluation: Evaluation, group: Group) -> int:
    """Return the bytes that a group keeps only for operators that come after the last one with a
    parameter."""
    number = int(evaluation.choices[group.name][0])
    facts = evaluation.batch.candidates.facts(group)[number]
    with_parameters = {op.name for op in _learning(strategy)[1]}
    last = max(n for n, op in enumerate(group.operators) if op.name in with_parameters)
    if len(facts.calls) != len(group.operators) or last == len(group.operators) - 1:
        return 0
    before = facts.calls[last - 1].kept_bytes if last else 0
    # Of the tensors it made, its results are for the other operators, the rest (statistics) for its own
    # backward.
    own = min(facts.calls[last].kept_bytes - before, _written(strategy, group, group.operators[last]))
    return facts.kept_bytes - facts.calls[last].kept_bytes + own


def _weights(strategy: Strategy) -> dict[str, list[float]]:
    """Return, for each group, the bytes of the gradients that operators give to parameters, or to what is
    made from parameters alone."""
    learning, with_parameters = _learning(strategy)
    found: dict[str, list[float]] = {}
    for op in with_parameters:
        configuration = strategy.configurations[strategy.graph.group_of[op.name].name]
        found.setdefault(configuration.group.name, []).extend(
            prod(local_shape(strategy.atoms(n), configuration.layout(n), strategy.mesh, None))
            * strategy.tensor(n).element_bytes
            for n in op.inputs()
            if n in learning
        )
    return found


def _of_parameters_alone(strategy: Strategy) -> frozenset[str]:
    """Return the groups that read only parameters and what is made from them."""
    learning, _ = _learning(strategy)
    return frozenset(g.name for g in strategy.graph.groups if g.writes and learning.issuperset(g.writes))


def waiting_bytes(strategy: Strategy) -> dict[str, int]:
    """Return, for each group, the bytes of the gradients of results that wait until parameter gradients are
    made from them.

    These are the gradients of every operator that reads a parameter, or something made from parameters alone,
    beside something else.
    """
    found: dict[str, int] = {}
    for op in _learning(strategy)[1]:
        group = strategy.graph.group_of[op.name]
        found[group.name] = found.get(group.name, 0) + _written(strategy, group, op)
    return found


def _learning(strategy: Strategy) -> tuple[frozenset[str], tuple[Operator, ...]]:
    """Return (trained parameters and what is made from them alone; the operators where these meet something
    else)."""
    graph, found = strategy.graph.atoms.graph, list[Operator]()
    fixed = {tensor.name for tensor in graph.tensors.values() if tensor.kind in ("buffer", "constant")}
    learning = {tensor.name for tensor in graph.parameters if tensor.requires_grad}
    for op in graph.operators:
        if learning.intersection(op.inputs()):
            if all(name in learning or name in fixed for name in op.inputs()):
                learning.update(op.outputs)
            else:
                found.append(op)
    return frozenset(learning), tuple(found)


def _written(strategy: Strategy, group: Group, op: Operator) -> int:
    """Return the bytes of what an operator of a group makes."""
    layouts = strategy.configurations[group.name].placed(op.name, strategy.graph.atoms, strategy.mesh, None)
    return sum(
        prod(layouts.write_shape(number)) * strategy.tensor(name).element_bytes
        for number, name in enumerate(op.outputs)
    )
