"""A schedule of tasks on devices and links, and the memory alive meanwhile: the clock of placed plans."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from tensoropt.errors import PlanError

Holding = tuple[str, str, float]
"""(device, kind of memory, bytes)."""


class Task(NamedTuple):
    """One piece of work.

    Attributes:
        resources: those it occupies throughout: ``device 0``, ``link node``,...
        after: the indices of its predecessors.
        allocates: memory taken when it starts.
        frees: memory given back when it ends.
        phase, group: for people: ``forward``, ``backward``,...; the operators it belongs to.
        ends: the devices that a message slows down.
    """

    name: str
    duration_s: float
    resources: tuple[str, ...] = ()
    after: Sequence[int] = ()
    allocates: tuple[Holding, ...] = ()
    frees: tuple[Holding, ...] = ()
    phase: str = ""
    group: str = ""
    ends: tuple[str, ...] = ()


@dataclass
class _MessagesUnderWay:
    """The messages in flight at a device while it works.

    An end is half of what a collective's kernel does on a rank, so it counts with half its seconds: s seconds
    of overlap do s / (1 + slower) seconds of work.

    Attributes:
        slower: infinite if messages block.
        flying_s: the remaining seconds of messages at ``since_s``.
    """

    slower: float
    flying_s: float = 0.0
    since_s: float = 0.0

    def begin(self, start_s: float, seconds: float) -> None:
        self._wait_until(start_s)
        self.flying_s += 0.5 * seconds

    def work_s(self, start_s: float, seconds: float) -> float:
        """Return the duration of work that takes ``seconds`` by itself."""
        self._wait_until(start_s)
        if seconds > 0.0 and self.flying_s > 0.0:
            lost = self.slower / (1.0 + self.slower) if self.slower < inf else 1.0
            seconds += min(self.flying_s * lost, seconds * self.slower)
        self.flying_s = max(self.flying_s - seconds, 0.0)
        self.since_s = start_s + seconds
        return seconds

    def _wait_until(self, time_s: float) -> None:
        if time_s > self.since_s:
            self.flying_s = max(self.flying_s - (time_s - self.since_s), 0.0)
            self.since_s = time_s


class _Event(NamedTuple):
    task: Task
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.task.duration_s


@dataclass(frozen=True)
class Timeline:
    """Scheduled tasks.

    Attributes:
        starts, ends: seconds.
        order: indices by start.
        initial: memory alive before the first task.
    """

    tasks: Sequence[Task]
    starts: Sequence[float]
    ends: Sequence[float]
    order: Sequence[int]
    initial: tuple[Holding, ...] = ()

    @cached_property
    def events(self) -> tuple[_Event, ...]:
        return tuple(map(_Event, self.tasks, self.starts))

    @cached_property
    def total_s(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self, resources: Iterable[str]) -> tuple[tuple[float, float], ...]:
        """Return the spans (start, end) in which any of the resources works, joined where they touch."""
        wanted = set(resources)
        return joined(
            (e.start_s, e.end_s)
            for e in self.events
            if e.task.duration_s > 0 and wanted.intersection(e.task.resources)
        )

    def memory(self, device: str) -> tuple[tuple[float, Mapping[str, float]], ...]:
        """Return (time, bytes by kind) after every change on a device, from the initial state on."""
        return tuple(self._curves.get(device, [(0.0, {})]))

    def steps(self, device: str) -> list[list[tuple[str, float]]]:
        """Return the changes (kind, bytes) at each point of a device's memory curve."""
        points = [[(kind, size) for where, kind, size in self.initial if where == device]]
        for _, holdings, sign in self._changes():
            changed = [(kind, sign * size) for where, kind, size in holdings if size and where == device]
            if changed:
                points.append(changed)
        return points

    def peak(self, device: str) -> tuple[float, Mapping[str, float]]:
        """Return (time, bytes by kind) at the first peak."""
        return max(self.memory(device), key=lambda point: sum(point[1].values()))

    @cached_property
    def _curves(self) -> dict[str, list[tuple[float, Mapping[str, float]]]]:
        now: dict[str, dict[str, float]] = {}
        for where, kind, size in self.initial:
            alive = now.setdefault(where, {})
            alive[kind] = alive.get(kind, 0.0) + size
        curves: dict[str, list[tuple[float, Mapping[str, float]]]] = {
            where: [(0.0, dict(alive))] for where, alive in now.items()
        }
        for time_s, holdings, sign in self._changes():
            touched = {}
            for where, kind, size in holdings:
                if size:
                    alive = touched[where] = now.setdefault(where, {})
                    alive[kind] = alive.get(kind, 0.0) + sign * size
            for where, alive in touched.items():
                curves.setdefault(where, [(0.0, {})]).append((time_s, dict(alive)))
        return curves

    def _changes(self) -> list[tuple[float, tuple[Holding, ...], int]]:
        changes = []
        for position, i in enumerate(self.order):
            event = self.events[i]
            # A task without duration must not free before it has allocated, so its frees are sorted among the
            # allocations of its time, by the order in which tasks were started.
            lasting = event.task.duration_s > 0
            changes.append((event.start_s, 1, position, 0, event.task.allocates, 1))
            changes.append((event.end_s, 0 if lasting else 1, position, 1, event.task.frees, -1))
        # By time, then frees before allocations, then the order of starts, then the allocation before the
        # free of one task.
        changes.sort(key=lambda change: change[:4])
        return [(change[0], change[4], change[5]) for change in changes]


def joined(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return tuple(result)


def length_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total seconds of all spans; overlaps count twice (see :func:`joined`)."""
    return sum(end - start for start, end in spans)


def schedule(
    tasks: Sequence[Task],
    initial: Iterable[Holding] = (),
    *,
    slower: float = 0.0,
) -> Timeline:
    """Assign times to tasks.

    Args:
        slower: the share by which messages slow down the devices at their ends.

    Raises:
        PlanError: a duration is negative or NaN, a predecessor is missing, or tasks deadlock.
    """
    waiting, successors = _links(tasks)
    # The heap orders by (time at which it became ready, position): ties keep the given order.
    ready = [(0.0, i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    earliest = [0.0] * len(tasks)
    free: dict[str, float] = {}
    timed = list(tasks)
    beside = {end: _MessagesUnderWay(slower) for task in tasks for end in task.ends} if slower else {}
    starts, ends, order = [0.0] * len(tasks), [0.0] * len(tasks), list[int]()
    while ready:
        start, i = heapq.heappop(ready)
        task = tasks[i]
        # A task taken from the heap keeps its resources' order even if it has to wait for one: nothing
        # overtakes.
        for resource in task.resources:
            if free.get(resource, 0.0) > start:
                start = free[resource]
        seconds = task.duration_s
        for name in task.ends if slower else ():
            beside[name].begin(start, seconds)
        if not task.ends and task.resources and task.resources[0] in beside:
            seconds = beside[task.resources[0]].work_s(start, seconds)
            timed[i] = task._replace(duration_s=seconds)
        end = start + seconds
        starts[i], ends[i] = start, end
        order.append(i)
        for resource in task.resources:
            free[resource] = end
        for j in successors[i]:
            if end > earliest[j]:
                earliest[j] = end
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (earliest[j], j))
    if len(order) < len(tasks):
        stuck = [tasks[i].name for i in sorted(set(range(len(tasks))).difference(order))]
        raise PlanError(
            f"{len(stuck)} tasks wait for each other for ever, among them {', '.join(stuck[:3])}; "
            "give an order without a cycle"
        )
    return Timeline(timed, starts, ends, order, tuple(initial))


def _links(tasks: Sequence[Task]) -> tuple[list[int], list[list[int]]]:
    waiting: list[int] = []
    successors: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        if not 0 <= task.duration_s < inf:
            raise PlanError(
                f"task {task.name} takes {task.duration_s} s; durations are finite and at least 0"
            )
        for j in task.after:
            if not 0 <= j < len(tasks):
                raise PlanError(f"task {task.name} comes after task {j}, but there are only {len(tasks)}")
            successors[j].append(i)
        waiting.append(len(task.after))
    return waiting, successors
