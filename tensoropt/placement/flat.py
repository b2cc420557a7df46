"""A placement problem as flat arrays, and the seconds of its step, for searches that try many placements.

This is the vectorised form of :mod:`.simulate`: the same tasks in the same order, without names and without
the bytes alive. It takes a hundredth of the time. What a search keeps, the simulator evaluates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tensoropt.placement.problem import Placement, PlacementProblem
from tensoropt.types import Floats

Integers = NDArray[np.int64]


class FlatProblem(NamedTuple):
    """A problem's step as arrays; with several micro-batches, everything once for each of them.

    Attributes:
        micro_batches: how often each operator occurs.
        forward_s, backward_s, update_s: (n, d) seconds by operator and device.
        has_update: (n,) whether the optimizer has something to do for the operator.
        producer: (t,) the operator that makes each tensor.
        gradient: (t,) whether a gradient comes back.
        first_reader: (t + 1,) where each tensor's readers begin in ``readers``.
        readers: the readers of all tensors.
        message_s: (t, d, d) the seconds of a tensor's message between two devices.
        first_lane: (d * d + 1,) where the lanes of each pair of devices begin in ``lanes``.
        lanes: the lanes of all pairs, by number.
        results_s: the seconds of each broadcast of a result.
        training: whether there is a backward.
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

    @classmethod
    def of(cls, problem: PlacementProblem) -> FlatProblem:
        """Return the arrays of a problem."""
        step = problem.repeated if problem.micro_batches > 1 else problem
        devices, count = step.devices, step.devices.count
        sizes = np.array([t.bytes for t in step.tensors], dtype=float)
        message_s = devices.latency_s + sizes[:, None, None] * devices.seconds_per_byte
        pairs = [devices.lanes_of(i, j) for i in range(count) for j in range(count)]
        number = {lane: i for i, lane in enumerate(dict.fromkeys(lane for pair in pairs for lane in pair))}
        first_lane, lanes = joined([number[lane] for lane in pair] for pair in pairs)
        first_reader, readers = joined(t.readers for t in step.tensors)
        peaks = step.update_peak_bytes
        return cls(
            problem.micro_batches,
            np.ascontiguousarray(step.forward_s, dtype=float),
            np.ascontiguousarray(step.backward_s, dtype=float),
            np.ascontiguousarray(step.update_s, dtype=float),
            np.zeros(step.size, bool) if peaks is None else np.asarray(peaks) > 0,
            np.array([t.producer for t in step.tensors], dtype=np.int64),
            np.array([t.gradient for t in step.tensors], dtype=bool),
            first_reader,
            readers,
            message_s,
            first_lane,
            lanes,
            np.array([result.seconds for result in step.results], dtype=float),
            step.training,
        )


def joined(rows: Iterable[Sequence[int]]) -> tuple[Integers, Integers]:
    """Return (where each row begins, and where the last ends; all rows one after another)."""
    rows = list(rows)
    first = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return first, np.array([item for row in rows for item in row], dtype=np.int64)


def step_s(problem: FlatProblem, placement: Placement) -> float:
    """Return the seconds of a placement's step, which are those that the simulator finds.

    The placement's orders must not wait for each other.
    """
    ahead, back = (
        np.array([o for order in orders for o in order], dtype=np.int64)
        for orders in (placement.forward, placement.backward_orders)
    )
    return float(flat_step(tuple(problem), np.array(placement.device, dtype=np.int64), ahead, back)[0])


@njit(cache=True, nogil=True)
def flat_step(
    problem: tuple[Any, ...], device: Integers, ahead: Integers, back: Integers
) -> tuple[float, Floats, Floats, Integers]:
    """Return (the seconds of a step, the starts of the forwards, the starts of the backwards, the critical
    operators), with (n,) starts of the first micro-batch; inf if the orders wait for each other.

    Each critical operator, or a message of its result or gradient, is what the next one, at last the end of
    the step, waited for.

    Args:
        problem: the values of a :class:`FlatProblem`.
        device: (n,) the device of each operator.
        ahead, back: (n,) all operators, forward and backward; each device runs its own in this order.
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
    ) = problem
    size = device.shape[0]
    devices = forward_s.shape[1]
    tensors = producer.shape[0]
    operators = size * count
    # Tasks have the positions that the simulator gives them, by which it decides between those that are ready
    # at the same time.
    first = np.zeros(devices + 1, np.int64)
    for o in range(size):
        first[device[o] + 1] += count
    for d in range(devices):
        first[d + 1] += first[d]
    arrival = np.full((tensors, devices), -1, np.int64)
    position = operators
    edges = 2 * operators
    for t in range(tensors):
        source = device[producer[t] % size]
        for r in range(first_reader[t], first_reader[t + 1]):
            d = device[readers[r] % size]
            if d != source and arrival[t, d] < 0:
                arrival[t, d] = 0
        for d in range(devices):
            if arrival[t, d] == 0:
                arrival[t, d] = position
                position += 1
        edges += 3 * (first_reader[t + 1] - first_reader[t]) + 4 * devices
    backward = position
    returned = np.full((tensors, devices), -1, np.int64)
    if training:
        position += operators
        for t in range(tensors):
            if gradient[t]:
                for d in range(devices):
                    if arrival[t, d] >= 0:
                        returned[t, d] = position
                        position += 1
        edges += 3 * operators
    update = position
    if training:
        position += devices
    results = position
    position += results_s.shape[0]
    edges += operators * (results_s.shape[0] + 1)

    seconds = np.zeros(position)
    waiting = np.zeros(position, np.int64)
    head = np.full(position, -1, np.int64)
    following = np.empty(edges, np.int64)
    target = np.empty(edges, np.int64)
    edge = 0
    pair = np.full(position, -1, np.int64)  # the devices of a message
    owner = np.full(position, -1, np.int64)  # the operator that a task runs, or whose tensor it sends
    ahead_of = np.empty(operators, np.int64)
    back_of = np.empty(operators, np.int64)
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
            owner[task] = ahead[k]
            if previous[d] >= 0:
                following[edge], target[edge], head[previous[d]] = head[previous[d]], task, edge
                edge += 1
                waiting[task] += 1
            previous[d] = task
    for t in range(tensors):
        maker = producer[t]
        source = device[maker % size]
        made = ahead_of[maker]
        for d in range(devices):
            task = arrival[t, d]
            if task >= 0:
                seconds[task] = message_s[t, source, d]
                owner[task] = maker % size
                pair[task] = source * devices + d
                following[edge], target[edge], head[made] = head[made], task, edge
                edge += 1
                waiting[task] += 1
        for r in range(first_reader[t], first_reader[t + 1]):
            reader = readers[r]
            d = device[reader % size]
            before = made if d == source else arrival[t, d]
            task = ahead_of[reader]
            following[edge], target[edge], head[before] = head[before], task, edge
            edge += 1
            waiting[task] += 1
    if training:
        for d in range(devices):
            place[d] = backward + first[d]
        updates = np.zeros(devices, np.bool_)
        for i in range(count):
            for k in range(size):
                o = back[k] + i * size
                d = device[back[k]]
                task = place[d]
                place[d] += 1
                back_of[o] = task
                seconds[task] = backward_s[o, d]
                owner[task] = back[k]
                # A device begins backward after its last forward operator.
                following[edge], target[edge], head[previous[d]] = head[previous[d]], task, edge
                edge += 1
                waiting[task] += 1
                following[edge], target[edge], head[ahead_of[o]] = head[ahead_of[o]], task, edge
                edge += 1
                waiting[task] += 1
                previous[d] = task
                seconds[update + d] += update_s[o, d]
                updates[d] = updates[d] or has_update[o]
        for t in range(tensors):
            maker = producer[t]
            source = device[maker % size]
            if gradient[t]:
                for d in range(devices):
                    task = returned[t, d]
                    if task >= 0:
                        seconds[task] = message_s[t, d, source]
                        owner[task] = maker % size
                        pair[task] = d * devices + source
                        made = back_of[maker]
                        following[edge], target[edge], head[task] = head[task], made, edge
                        edge += 1
                        waiting[made] += 1
                for r in range(first_reader[t], first_reader[t + 1]):
                    reader = readers[r]
                    d = device[reader % size]
                    task = back_of[maker] if d == source else returned[t, d]
                    before = back_of[reader]
                    following[edge], target[edge], head[before] = head[before], task, edge
                    edge += 1
                    waiting[task] += 1
            # The optimizer begins when all that its device has sent is gone.
            for d in range(devices):
                if arrival[t, d] >= 0:
                    task = arrival[t, d]
                    following[edge], target[edge], head[task] = head[task], update + source, edge
                    edge += 1
                    waiting[update + source] += 1
                if returned[t, d] >= 0:
                    task = returned[t, d]
                    following[edge], target[edge], head[task] = head[task], update + d, edge
                    edge += 1
                    waiting[update + d] += 1
        for d in range(devices):
            if seconds[update + d] == 0.0 and not updates[d]:
                waiting[update + d] = -1  # no such task
            elif previous[d] >= 0:
                following[edge], target[edge], head[previous[d]] = head[previous[d]], update + d, edge
                edge += 1
                waiting[update + d] += 1
    for r in range(results_s.shape[0]):
        seconds[results + r] = results_s[r]
        for o in range(operators):
            task = ahead_of[o]
            following[edge], target[edge], head[task] = head[task], results + r, edge
            edge += 1
            waiting[results + r] += 1

    free = np.zeros(lanes.max() + 1 if lanes.shape[0] else 1)
    user = np.full(free.shape[0], -1, np.int64)  # the last message on each lane
    cause = np.full(position, -1, np.int64)  # the task whose end a task waited for
    final = np.int64(-1)
    broadcast = 0.0
    starts = np.zeros(position)
    earliest = np.zeros(position)
    last = 0.0
    done = 0
    missing = 0
    ready = [(0.0, np.int64(0)) for _ in range(0)]
    for task in range(position):
        if waiting[task] == 0:
            heapq.heappush(ready, (0.0, np.int64(task)))
        elif waiting[task] < 0:
            missing += 1
    while len(ready) > 0:
        start, task = heapq.heappop(ready)
        if pair[task] >= 0:
            for k in range(first_lane[pair[task]], first_lane[pair[task] + 1]):
                lane = lanes[k]
                if free[lane] > start:
                    start, cause[task] = free[lane], user[lane]
        elif task >= results:
            start = max(start, broadcast)
        end = start + seconds[task]
        if pair[task] >= 0:
            for k in range(first_lane[pair[task]], first_lane[pair[task] + 1]):
                free[lanes[k]] = end
                user[lanes[k]] = task
        elif task >= results:
            broadcast = end
        starts[task] = start
        if end >= last:
            last, final = end, task
        done += 1
        edge = head[task]
        while edge >= 0:
            after = target[edge]
            if waiting[after] > 0:
                if end >= earliest[after]:
                    earliest[after], cause[after] = end, task
                waiting[after] -= 1
                if waiting[after] == 0:
                    heapq.heappush(ready, (earliest[after], after))
            edge = following[edge]
    if done + missing < position:
        last = np.inf
    begins = np.empty(size)
    returns = np.zeros(size)
    for o in range(size):
        begins[o] = starts[ahead_of[o]]
        if training:
            returns[o] = starts[back_of[o]]
    critical = np.empty(position, np.int64)
    number = 0
    while final >= 0:
        if owner[final] >= 0:
            critical[number] = owner[final]
            number += 1
        final = cause[final]
    return last, begins, returns, critical[:number]
