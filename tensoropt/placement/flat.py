"""A placement problem as flat arrays, and the seconds of its step, for searches over many placements."""

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
    """A problem's step as arrays; with several micro-batches, everything once for each.

    Attributes:
        micro_batches: the copies of each operator.
        forward_s, backward_s, update_s: (n, d) seconds by operator and device.
        has_update: (n,) whether the operator has an optimizer step.
        producer: (t,) the operator that makes each tensor.
        gradient: (t,) whether a gradient comes back.
        first_reader: (t + 1,) the start of each tensor's readers in ``readers``.
        message_s: (t, d, d) the seconds of a tensor's message between two devices.
        first_lane: (d * d + 1,) the start of each pair's lanes in ``lanes``.
        results_s: seconds of each result's broadcast.
        host_s: (n, d) the host's seconds to launch an operator in a step.
        ends: (d, 6) :class:`~tensoropt.placement.problem.MessageEnds`.
        slower: the share by which messages slow down work.
        sizes: (t,) the bytes of each tensor.
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

    @classmethod
    def of(cls, problem: PlacementProblem) -> FlatProblem:
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
            np.zeros_like(step.forward_s, dtype=float)
            if step.host_s is None
            else np.ascontiguousarray(step.host_s, dtype=float),
            devices.end_seconds,
            float(devices.slower),
            sizes,
        )


def joined(rows: Iterable[Sequence[int]]) -> tuple[Integers, Integers]:
    """Return (the start of each row and the end, all rows concatenated)."""
    rows = list(rows)
    first = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return first, np.array([item for row in rows for item in row], dtype=np.int64)


def step_s(problem: FlatProblem, placement: Placement) -> float:
    """Return the seconds of a placement's step, as the simulator finds them; its orders must not deadlock."""
    ahead, back = (
        np.array([o for order in orders for o in order], dtype=np.int64)
        for orders in (placement.forward, placement.backward_orders)
    )
    return float(flat_step(tuple(problem), np.array(placement.device, dtype=np.int64), ahead, back)[0])


@njit(cache=True, nogil=True)
def flat_step(
    problem: tuple[Any, ...], device: Integers, ahead: Integers, back: Integers
) -> tuple[float, Floats, Floats]:
    """Return (step seconds, forward starts (n,), backward starts (n,)).

    Starts are the first micro-batch's; seconds are inf on deadlock.

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
        host_s,
        ends,
        slower,
        sizes,
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
    where = np.full(position, -1, np.int64)  # the device of work
    host = np.zeros(devices)
    for o in range(operators):
        host[device[o % size]] += host_s[o, device[o % size]]
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
            where[task] = d
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
                pair[task] = source * devices + d
                reader = np.int64(position)
                for r in range(first_reader[t], first_reader[t + 1]):
                    if device[readers[r] % size] == d:
                        reader = min(reader, ahead_of[readers[r]])
                seconds[made] += ends[source, 0]
                seconds[reader] += ends[d, 0] + sizes[t] * ends[d, 1]
                host[source] += ends[source, 4]
                host[d] += ends[d, 4]
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
                where[task] = d
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
            shares = 0
            for r in range(first_reader[t], first_reader[t + 1]):
                shares += device[readers[r] % size] == source
            if gradient[t]:
                for d in range(devices):
                    task = returned[t, d]
                    if task >= 0:
                        seconds[task] = message_s[t, d, source]
                        pair[task] = d * devices + source
                        made = back_of[maker]
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
            where[update + d] = d
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
    broadcast = 0.0
    starts = np.zeros(position)
    # The remaining seconds of messages beside each device's work, and since when.
    flying, since = np.zeros(devices), np.zeros(devices)
    lost = slower / (1.0 + slower) if slower < np.inf else 1.0
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
                start = max(start, free[lanes[k]])
        elif task >= results:
            start = max(start, broadcast)
        took = seconds[task]
        if slower > 0.0 and (pair[task] >= 0 or task >= results):
            for d in range(devices):
                if pair[task] >= 0 and d != pair[task] // devices and d != pair[task] % devices:
                    continue
                if start > since[d]:
                    flying[d] = max(flying[d] - (start - since[d]), 0.0)
                    since[d] = start
                flying[d] += 0.5 * took
        if slower > 0.0 and where[task] >= 0:
            d = where[task]
            if start > since[d]:
                flying[d] = max(flying[d] - (start - since[d]), 0.0)
                since[d] = start
            if took > 0.0 and flying[d] > 0.0:
                took += min(flying[d] * lost, took * slower)
            flying[d] = max(flying[d] - took, 0.0)
            since[d] = start + took
        end = start + took
        if pair[task] >= 0:
            for k in range(first_lane[pair[task]], first_lane[pair[task] + 1]):
                free[lanes[k]] = end
        elif task >= results:
            broadcast = end
        starts[task] = start
        last = max(last, end)
        done += 1
        edge = head[task]
        while edge >= 0:
            after = target[edge]
            if waiting[after] > 0:
                earliest[after] = max(earliest[after], end)
                waiting[after] -= 1
                if waiting[after] == 0:
                    heapq.heappush(ready, (earliest[after], after))
            edge = following[edge]
    if done + missing < position:
        last = np.inf
    last = max(last, host.max())
    begins = np.empty(size)
    returns = np.zeros(size)
    for o in range(size):
        begins[o] = starts[ahead_of[o]]
        if training:
            returns[o] = starts[back_of[o]]
    return last, begins, returns
