"""Placement problems, and the tasks of a simulated step, as flat arrays for compiled (Numba) code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tensoropt.placement.problem import Placement, PlacementProblem
from tensoropt.simulate.timeline import by_predecessor, take_place
from tensoropt.types import Floats, Itself

Integers = NDArray[np.int64]


class FlatProblem(NamedTuple):
    """The step of a placement problem as arrays over operators (n), tensors (t) and devices (d).

    Attributes:
        micro_batches: the number of copies of each operator and tensor, one per micro-batch.
        forward_s, backward_s, update_s: (n, d) seconds by operator and device.
        has_update: (n,) whether the operator has an optimizer step.
        producer: (t,) the operator that makes each tensor.
        gradient: (t,) whether the tensor's readers return a gradient.
        first_reader: (t + 1,) the start of each tensor's readers in ``readers``.
        message_s: (t, d, d) the duration in seconds of sending a tensor between two devices.
        first_lane, lanes: the lanes (resources that one task occupies at a time) of messages between each
            ordered pair of devices, then of broadcasts, then of each device's computation; row ``i`` is
            ``lanes[first_lane[i] : first_lane[i + 1]]``.
        results_s: the duration in seconds of each result's broadcast.
        host_s: (n, d) the host's seconds to launch an operator in a step.
        ends: (d, 6) the costs at the ends of messages, as :attr:`.DeviceSet.ends`.
        slower: the share by which messages slow down computation.
        sizes: (t,) the size in bytes of each tensor.
        first_end, message_ends: for each row of ``lanes``, the devices that its messages slow down.
    """

    micro_batches: int
    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    has_update: NDArray[np.bool_]
    producer: Integers
    gradient: NDArray[np.bool_]
    first_reader: Integers
    readers: Integers
    message_s: Floats
    first_lane: Integers
    lanes: Integers
    results_s: Floats
    training: bool
    host_s: Floats
    ends: Floats
    slower: float
    sizes: Floats
    first_end: Integers
    message_ends: Integers

    @classmethod
    def of(cls, problem: PlacementProblem) -> FlatProblem:
        return _flat(Itself(problem))


@lru_cache(maxsize=4)
def _flat(of: Itself[PlacementProblem]) -> FlatProblem:
    problem = of.content
    step, devices, count = problem.repeated, problem.devices, problem.devices.count
    sizes = np.array([t.bytes for t in step.tensors], dtype=float)
    message_s = devices.latency_s + sizes[:, None, None] * devices.seconds_per_byte
    everyone = tuple(range(count))
    pairs = [(i, j) for i in everyone for j in everyone]
    used = [
        *(devices.lanes_of(*pair) for pair in pairs),
        ("all devices",),
        *((f"device {d}",) for d in everyone),
    ]
    number = {lane: i for i, lane in enumerate(dict.fromkeys(lane for lanes in used for lane in lanes))}
    first_lane, lanes = joined([number[lane] for lane in of_one] for of_one in used)
    first_end, message_ends = joined([*pairs, everyone, *(() for _ in everyone)])
    first_reader, readers = joined(t.readers for t in step.tensors)
    return FlatProblem(
        problem.micro_batches,
        np.ascontiguousarray(step.forward_s, dtype=float),
        np.ascontiguousarray(step.backward_s, dtype=float),
        np.ascontiguousarray(step.update_s, dtype=float),
        np.asarray(step.update_peak_bytes) > 0,
        np.array([t.producer for t in step.tensors], dtype=np.int64),
        np.array([t.gradient for t in step.tensors], dtype=bool),
        first_reader,
        readers,
        message_s,
        first_lane,
        lanes,
        np.array([result.seconds for result in step.results], dtype=float),
        step.training,
        np.ascontiguousarray(step.host_s, dtype=float),
        np.zeros((count, 6)) if devices.ends is None else devices.ends,
        float(devices.slower),
        sizes,
        first_end,
        message_ends,
    )


def joined(rows: Iterable[Sequence[int]]) -> tuple[Integers, Integers]:
    """Return (offsets, items), where row ``i`` of ``rows`` is ``items[offsets[i] : offsets[i + 1]]``."""
    rows = list(rows)
    first = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return first, np.array([item for row in rows for item in row], dtype=np.int64)


def arrays_of(placement: Placement) -> tuple[Integers, Integers, Integers]:
    """Return each operator's device, and all operators device by device, in forward and in backward order."""
    ahead, back = (
        np.array([o for order in orders for o in order], dtype=np.int64)
        for orders in (placement.forward, placement.backward)
    )
    return np.array(placement.device, dtype=np.int64), ahead, back


def step_s(problem: FlatProblem, placement: Placement) -> float:
    """Return the simulated duration in seconds of a placement's step; infinite if it deadlocks."""
    return float(flat_step(tuple(problem), *arrays_of(placement))[0])


class StepTasks(NamedTuple):
    """The tasks of a placement's step: forwards, messages, backwards, gradients, optimizers, results.

    Attributes:
        columns: the arguments of :func:`~tensoropt.simulate.timeline.take_place`.
        forward, backward: the task of each operator, of all micro-batches; backward is empty in inference.
        arrival, returned: (t, d) the task that sends a tensor to a device, or its gradient back; -1 for none.
        update: (d,) the task of each device's optimizer; -1 for none.
        host_s: (d,) the seconds that each device's host takes to launch the step's operators and messages.
    """

    columns: tuple[Any, ...]
    forward: Integers
    backward: Integers
    arrival: Integers
    returned: Integers
    update: Integers
    host_s: Floats


@njit(cache=True, nogil=True)
def flat_step(
    problem: tuple[Any, ...], device: Integers, ahead: Integers, back: Integers
) -> tuple[float, Floats, Floats]:
    """Return the step's duration in seconds, and the starts (n,) of forwards and of backwards.

    Starts are the first micro-batch's. If the placement deadlocks, the duration is infinite. ``ahead`` and
    ``back`` (n,) are all operators in the order of forward and of backward.
    """
    tasks, ahead_of, back_of, _, _, _, host = step_tasks(problem, device, ahead, back, True)
    starts, ends, order = take_place(*tasks)
    last = max(ends.max(), host.max()) if len(order) == len(starts) else np.inf
    size = device.shape[0]
    returns = starts[back_of[:size]] if len(back_of) else np.zeros(size)
    return last, starts[ahead_of[:size]], returns


@njit(cache=True, nogil=True)
def _pair(pairs: Integers, count: int, before: int, behind: int) -> int:
    pairs[0, count], pairs[1, count] = before, behind
    return count + 1


@njit(cache=True, nogil=True)
def step_tasks(
    problem: tuple[Any, ...], device: Integers, ahead: Integers, back: Integers, enforced: bool
) -> tuple[Any, ...]:
    """Return the tasks of a placement's step, as the values of :class:`StepTasks`.

    Args:
        problem: the values of a :class:`FlatProblem`.
        device: (n,) the device of each operator.
        ahead, back: (n,) all operators, forward and backward; each device runs its own in this order.
        enforced: whether devices keep to these orders; otherwise they run what is ready first.
    """
    # A plain tuple: the cache of compiled kernels would not survive a new name of the class.
    (
        count,
        forward_s,
        backward_s,
        update_s,
        has_update,
        producer,
        gradient,
        first_reader,
        readers,
        message_s,
        first_lane,
        lanes,
        results_s,
        training,
        host_s,
        ends,
        slower,
        sizes,
        first_end,
        message_ends,
    ) = problem
    size = device.shape[0]
    devices = forward_s.shape[1]
    tensors = producer.shape[0]
    operators = size * count
    # Tasks that are ready at the same time run in the order of their numbers.
    first = np.zeros(devices + 1, np.int64)
    for o in range(size):
        first[device[o] + 1] += count
    for d in range(devices):
        first[d + 1] += first[d]
    arrival = np.full((tensors, devices), -1, np.int64)
    returned = np.full((tensors, devices), -1, np.int64)
    position = operators
    for t in range(tensors):
        for r in range(first_reader[t], first_reader[t + 1]):
            d = device[readers[r] % size]
            if d != device[producer[t] % size]:
                arrival[t, d] = 0
        for d in range(devices):
            if arrival[t, d] == 0:
                arrival[t, d] = position
                position += 1
    backward = position
    update = np.full(devices, -1, np.int64)
    if training:
        position += operators
        for t in range(tensors):
            for d in range(devices):
                if gradient[t] and arrival[t, d] >= 0:
                    returned[t, d] = position
                    position += 1
        for o in range(operators):
            if update_s[o, device[o % size]] > 0.0 or has_update[o]:
                update[device[o % size]] = 0
        for d in range(devices):
            if update[d] == 0:
                update[d] = position
                position += 1
    results = position
    position += results_s.shape[0]

    seconds = np.zeros(position)
    uses = np.full(position, -1, np.int64)
    works = np.full(position, -1, np.int64)
    most = 4 * operators + 2 * len(readers) + 4 * tensors * devices + devices + operators * len(results_s)
    pairs, edges = np.empty((2, most), np.int64), 0
    host = np.zeros(devices)
    for o in range(operators):
        host[device[o % size]] += host_s[o, device[o % size]]
    ahead_of = np.empty(operators, np.int64)
    back_of = np.empty(operators if training else 0, np.int64)
    previous = np.full(devices, -1, np.int64)
    place = first.copy()
    for i in range(count):
        for k in range(size):
            o = ahead[k] + i * size
            d = device[ahead[k]]
            task = place[d]
            place[d] += 1
            ahead_of[o] = task
            seconds[task] = forward_s[o, d]
            works[task] = d
            # Without an order, a device is a resource for one operator at a time, the first that is ready.
            if not enforced:
                uses[task] = devices * devices + 1 + d
            elif previous[d] >= 0:
                edges = _pair(pairs, edges, previous[d], task)
            previous[d] = task
    for t in range(tensors):
        source = device[producer[t] % size]
        made = ahead_of[producer[t]]
        for d in range(devices):
            task = arrival[t, d]
            if task >= 0:
                seconds[task] = message_s[t, source, d]
                uses[task] = source * devices + d
                reader = np.int64(position)
                for r in range(first_reader[t], first_reader[t + 1]):
                    if device[readers[r] % size] == d:
                        reader = min(reader, ahead_of[readers[r]])
                seconds[made] += ends[source, 0]
                seconds[reader] += ends[d, 0] + sizes[t] * ends[d, 1]
                host[source] += ends[source, 4]
                host[d] += ends[d, 4]
                edges = _pair(pairs, edges, made, task)
        for r in range(first_reader[t], first_reader[t + 1]):
            d = device[readers[r] % size]
            edges = _pair(pairs, edges, made if d == source else arrival[t, d], ahead_of[readers[r]])
    if training:
        for d in range(devices):
            place[d] = backward + first[d]
        for i in range(count):
            for k in range(size):
                o = back[k] + i * size
                d = device[back[k]]
                task = place[d]
                place[d] += 1
                back_of[o] = task
                seconds[task] = backward_s[o, d]
                works[task] = d
                if not enforced:
                    uses[task] = devices * devices + 1 + d
                else:  # a device begins backward after its last forward operator, as one process does
                    edges = _pair(pairs, edges, previous[d], task)
                edges = _pair(pairs, edges, ahead_of[o], task)
                previous[d] = task
                if update[d] >= 0:
                    seconds[update[d]] += update_s[o, d]
                    works[update[d]] = d
                    uses[update[d]] = uses[task]
                    if not enforced:
                        edges = _pair(pairs, edges, task, update[d])
        for t in range(tensors):
            source = device[producer[t] % size]
            made = back_of[producer[t]]
            shares = 0
            for r in range(first_reader[t], first_reader[t + 1]):
                shares += device[readers[r] % size] == source
            if gradient[t]:
                for d in range(devices):
                    task = returned[t, d]
                    if task >= 0:
                        seconds[task] = message_s[t, d, source]
                        uses[task] = d * devices + source
                        reader = np.int64(-1)
                        for r in range(first_reader[t], first_reader[t + 1]):
                            if device[readers[r] % size] == d:
                                reader = max(reader, back_of[readers[r]])
                        seconds[reader] += ends[d, 0]
                        seconds[made] += ends[source, 0] + sizes[t] * ends[source, 1]
                        host[d] += ends[d, 4]
                        host[source] += ends[source, 4]
                        if shares > 0:  # the first share becomes the gradient as it is
                            seconds[made] += ends[source, 2] + sizes[t] * ends[source, 3]
                            host[source] += ends[source, 5]
                        shares += 1
                        edges = _pair(pairs, edges, task, made)
                for r in range(first_reader[t], first_reader[t + 1]):
                    d = device[readers[r] % size]
                    task = made if d == source else returned[t, d]
                    edges = _pair(pairs, edges, back_of[readers[r]], task)
            # The optimizer begins when all that its device has sent is gone (``Transport.finish``).
            for d in range(devices):
                if arrival[t, d] >= 0 and update[source] >= 0:
                    edges = _pair(pairs, edges, arrival[t, d], update[source])
                if returned[t, d] >= 0 and update[d] >= 0:
                    edges = _pair(pairs, edges, returned[t, d], update[d])
        for d in range(devices):
            if enforced and update[d] >= 0:
                edges = _pair(pairs, edges, previous[d], update[d])
    for r in range(results_s.shape[0]):
        seconds[results + r] = results_s[r]
        uses[results + r] = devices * devices
        for o in range(operators):
            edges = _pair(pairs, edges, ahead_of[o], results + r)
    predecessors, first_after, after = by_predecessor(pairs[0, :edges], pairs[1, :edges], position)
    columns = (
        seconds,
        predecessors,
        first_after,
        after,
        uses,
        first_lane,
        lanes,
        first_end,
        message_ends,
        works,
        slower,
    )
    return columns, ahead_of, back_of, arrival, returned, update, host
