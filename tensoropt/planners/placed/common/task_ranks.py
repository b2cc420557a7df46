"""The upward ranks and the critical path of a step's forward and backward tasks, as one directed graph.

X. Yi et al., *Fast Training of Deep Learning Models over Multiple GPUs* (FastT), Middleware 2020, section
5.1. The upward rank is that of HEFT (H. Topcuoglu et al., IEEE TPDS 13(3), 2002, equation 7), with the
longest instead of the mean times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.units import Units
from tensoropt.types import Floats


@dataclass(frozen=True)
class Ranks:
    """Upward ranks: the longest time from a task's start to the end of the step, in seconds.

    Attributes:
        forward, backward: (operators,) seconds. Backward ends with the optimizer's step for the parameters
            whose gradients it computed.
        path: the operators on the critical path, each once, in the order of the path.
    """

    forward: Floats
    backward: Floats
    path: tuple[int, ...]


def _longest_transfers(problem: PlacementProblem, units: Units) -> Floats:
    """Return the longest time to send each tensor between its possible devices, in seconds, (tensors,)."""
    devices, tensors, allowed = problem.devices, problem.tensors, units.allowed[list(units.of)]
    longest_s = np.zeros(len(tensors))
    # One by one: each has a table of all pairs of devices.
    for number, tensor in enumerate(tensors):
        pair = np.ix_(allowed[tensor.producer], allowed[list(tensor.readers)].any(axis=0))
        seconds = devices.latency_s[pair] + tensor.bytes * devices.seconds_per_byte[pair]
        longest_s[number] = seconds.max(initial=0.0)
    return longest_s


def ranks_of(problem: PlacementProblem, units: Units) -> Ranks:
    """Return rank_u(i) = w_i + max over successors j of (c_ij + rank_u(j)) (FastT, section 5.1).

    w_i is the longest time of task i on any of its possible devices. c_ij is the longest time of a message
    between possible devices of i and j; it is 0 between operators that must share a device.
    """
    allowed, unit_of = units.allowed[list(units.of)], units.of
    sends = _longest_transfers(problem, units).tolist()
    return _ranks(
        problem,
        lambda seconds: np.where(allowed, seconds, 0.0).max(axis=1),
        lambda number, a, b: 0.0 if unit_of[a] == unit_of[b] else sends[number],
    )


def placed_ranks(problem: PlacementProblem, device: Sequence[int]) -> Ranks:
    """Return upward ranks under a placement: w_i and c_ij are the times on the operators' own devices."""
    tensors, devices, own = problem.tensors, problem.devices, (np.arange(problem.size), list(device))
    return _ranks(
        problem,
        lambda seconds: seconds[own],
        lambda number, a, b: devices.transfer_s(tensors[number].bytes, device[a], device[b]),
    )


def _ranks(
    problem: PlacementProblem, weigh: Callable[[Floats], Floats], sent: Callable[[int, int, int], float]
) -> Ranks:
    """Return the upward ranks for given durations.

    Args:
        weigh: seconds on each device, (operators, devices) -> the duration w_i of each task, (operators,).
        sent: (tensor, sender, receiver) -> the duration of the message in seconds. A gradient goes from the
            tensor's reader to its producer.
    """
    weights = [weigh(each).tolist() for each in (problem.forward_s, problem.backward_s, problem.update_s)]
    tensors = problem.tensors
    backward, forward = [0.0] * problem.size, [0.0] * problem.size
    # The model's order is a topological one, and backward goes against it: the readers of a gradient are
    # ranked first.
    for operator in range(problem.size) if problem.training else ():
        most = weights[2][operator]
        for number in problem.read[operator]:
            tensor = tensors[number]
            if tensor.gradient:
                most = max(most, sent(number, operator, tensor.producer) + backward[tensor.producer])
        backward[operator] = weights[1][operator] + most
    for operator in reversed(range(problem.size)):
        most = backward[operator]
        for number in problem.made[operator]:
            for reader in tensors[number].readers:
                most = max(most, sent(number, operator, reader) + forward[reader])
        forward[operator] = weights[0][operator] + most
    return Ranks(np.array(forward), np.array(backward), _path(problem, forward, backward, weights[2]))


def _path(
    problem: PlacementProblem, forward: Sequence[float], backward: Sequence[float], update: Sequence[float]
) -> tuple[int, ...]:
    """Return the operators of the critical path from the entry operation on: "recursively the operation with
    the largest rank among the successors" (section 5.1), without transfers.
    """
    if not forward:
        return ()
    tensors = problem.tensors
    operator, visited = max(range(len(forward)), key=forward.__getitem__), dict[int, None]()
    while True:
        visited[operator] = None
        readers = {reader for number in problem.made[operator] for reader in tensors[number].readers}
        following = max(sorted(readers), key=forward.__getitem__, default=operator)
        if following == operator or (problem.training and forward[following] <= backward[operator]):
            break
        operator = following
    while problem.training:
        visited[operator] = None
        makers = {tensors[n].producer for n in problem.read[operator] if tensors[n].gradient}
        following = max(sorted(makers), key=backward.__getitem__, default=operator)
        if following == operator or backward[following] <= update[operator]:
            break
        operator = following
    return tuple(visited)
