"""Simulate the step of a placed plan: the times of operators and messages, and each device's memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from tensoropt.errors import PlanError
from tensoropt.placement.flat import FlatProblem, StepTasks, arrays_of, step_tasks
from tensoropt.placement.order import Flow, TensorTransfer, ordered
from tensoropt.placement.problem import Placement, PlacementProblem, repeat_placement
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.simulate.timeline import joined, length_s, take_place
from tensoropt.types import Floats

_KEPT, _TRANSIENT = MEMORY_KINDS.index("kept"), MEMORY_KINDS.index("transient")


@cache
def device_name(device: int) -> str:
    return f"device {device}"


class _Holding(NamedTuple):
    """Memory in use on a device from the start of one task to the end of another.

    Attributes:
        kind: index into :data:`~tensoropt.simulate.recording.MEMORY_KINDS`.
        first, last: the numbers of the two tasks; -1 for the whole step.
        operator, tensor: the numbers of the operator and tensor that own the memory; -1 for none.
    """

    device: int
    kind: int
    bytes: float
    first: int
    last: int
    operator: int
    tensor: int
    what: str


class _PlacedEvent(NamedTuple):
    """A task of a step with names for reports.

    Attributes:
        name: the operator or tensor, with the micro-batch.
        group: the operator alone.
        lanes: the names of the device or of the links that the task occupies.
        ends: the devices between which a message goes; empty for computation.
    """

    name: str
    phase: str
    group: str
    lanes: tuple[str, ...]
    ends: tuple[int, ...]
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def words(self) -> str:
        return f"{self.phase} {self.name}" if self.name != self.phase else self.name


@dataclass(slots=True)
class _GradientStorage:
    """The memory of a gradient of ``tensor``. ``tasks``: the task that allocates it, then its users."""

    tensor: int
    device: int
    bytes: float
    tasks: list[int]


@dataclass(frozen=True)
class SimulatedPlacement:
    """One simulated training step of a placement.

    Attributes:
        tasks: all tasks, of all micro-batches.
        starts, ends: (tasks,) times in seconds.
        order: the numbers of the tasks, by start.
        holdings: all allocations of the step, each with its first and last task.
        transfers: the messages of the first micro-batch, in the order in which they start.
    """

    problem: PlacementProblem
    placement: Placement
    tasks: StepTasks
    starts: np.ndarray
    ends: np.ndarray
    order: Sequence[int]
    holdings: Sequence[_Holding]
    transfers: tuple[TensorTransfer, ...]

    @property
    def micro_batches(self) -> int:
        return self.problem.micro_batches

    @property
    def host_s(self) -> tuple[float, ...]:
        """The seconds that each device's host takes to launch its operators; 0 on CPUs."""
        return tuple(self.tasks.host_s.tolist())

    @property
    def time_s(self) -> float:
        """The duration of the step in seconds: that of the slowest device or host."""
        return max(float(self.ends.max()), *self.host_s, 0.0)

    @property
    def operator_starts(self) -> np.ndarray:
        """(2, operators) start seconds of the first micro-batch's forwards and backwards (0 in inference)."""
        size = self.problem.size
        back = self.starts[self.tasks.backward[:size]] if self.problem.training else np.zeros(size)
        return np.stack([self.starts[self.tasks.forward[:size]], back])

    @cached_property
    def _changes(self) -> tuple[np.ndarray, np.ndarray]:
        """The points of tasks' starts and ends on the memory curve, and the time in seconds of each point."""
        count, ranks = len(self.starts), np.argsort(self.order)
        times, starting = np.concatenate([self.starts, self.ends]), np.repeat([True, False], count)
        # By time, then frees before allocations, then by the order of starts. A task without duration must
        # not free before it has allocated, so its frees are sorted among the allocations of its time.
        late = starting | np.tile(self.ends <= self.starts, 2)
        by_time = np.lexsort((~starting, np.tile(ranks, 2), late, times))
        positions = np.empty(2 * count, dtype=np.int64)
        positions[by_time] = np.arange(1, 2 * count + 1)
        return positions.reshape(2, count), np.append(0.0, times[by_time])

    @cached_property
    def _spans(self) -> np.ndarray:
        """(4, holdings) each allocation's device, kind, first and last memory-curve point (0: whole step)."""
        (begins, overs), _ = self._changes
        rows = np.array([(h.device, h.kind, h.first, h.last) for h in self.holdings], dtype=np.int64)
        devices, kinds, first, last = rows.reshape(-1, 4).T
        return np.stack([devices, kinds, *np.where(first < 0, 0, (begins[first], overs[last]))])

    def _points(self, device: int) -> np.ndarray:
        """Return point 0 of the memory curve, and the points at which a device's memory changes."""
        return np.unique(np.append(self._spans[2:, self._spans[0] == device], 0))

    @cached_property
    def _curves(self) -> np.ndarray:
        """(devices, kinds, points) bytes in use after each change of memory on any device."""
        devices, kinds, first, last = self._spans
        curves = np.zeros((self.problem.devices.count, len(MEMORY_KINDS), 2 * len(self.starts) + 1))
        sizes = np.array([holding.bytes for holding in self.holdings])
        np.add.at(curves, (devices, kinds, first), sizes)
        np.add.at(curves, (devices, kinds, last), np.where(last > 0, -sizes, 0.0))
        return curves.cumsum(axis=2)

    def memory(self, device: int) -> list[tuple[float, list[float]]]:
        """Return (seconds, bytes by kind) at the step's start and after each change of a device's memory."""
        points, (_, times) = self._points(device), self._changes
        curve = self._curves[device][:, points].T
        return list(zip(times[points].tolist(), curve.tolist(), strict=True))

    def spans(self, device: int) -> Iterator[tuple[_Holding, int, int]]:
        """Yield each allocation on a device, with its first and last point on the device's memory curve."""
        points = self._points(device)
        first, last = np.searchsorted(points, self._spans[2:])
        for holding, begin, end in zip(self.holdings, first.tolist(), last.tolist(), strict=True):
            if holding.device == device:
                yield holding, begin, end or len(points)

    @cached_property
    def peaks(self) -> tuple[dict[str, float], ...]:
        """For each device, the bytes by kind when its memory peaks (for the first time)."""
        highest = self._curves.sum(axis=1).argmax(axis=1)
        return tuple(
            dict(zip(MEMORY_KINDS, self._curves[device, :, at].tolist(), strict=True))
            for device, at in enumerate(highest)
        )

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        return tuple(sum(peak.values()) for peak in self.peaks)

    @property
    def memory_bytes(self) -> float:
        return max(self.peak_bytes)

    @cached_property
    def events(self) -> tuple[_PlacedEvent, ...]:
        """All tasks as events with names, in the order of the tasks' numbers."""
        problem, place, tasks = self.problem, self.placement, self.tasks
        names, tensors, device = problem.names, problem.tensors, place.device
        told: dict[int, tuple[str, str, str, tuple[str, ...], tuple[int, ...]]] = {}

        for phase, of_phase in (("forward", tasks.forward), ("backward", tasks.backward)):
            for number, task in enumerate(of_phase.tolist()):
                micro_batch, o = divmod(number, problem.size)
                told[task] = self.label(names[o], micro_batch), phase, names[o], (device_name(device[o]),), ()
        for phase, messages in (("send", tasks.arrival), ("send gradient", tasks.returned)):
            for (number, other), task in _numbered(messages):
                micro_batch, t = divmod(number, len(tensors))
                ends = device[tensors[t].producer], other
                source, target = ends if phase == "send" else ends[::-1]
                lanes, group = problem.devices.lanes_of(source, target), names[tensors[t].producer]
                told[task] = self.label(tensors[t].name, micro_batch), phase, group, lanes, (source, target)
        for d, task in enumerate(tasks.update.tolist()):
            told[task] = "optimizer", "optimizer", "", (device_name(d),), ()
        everyone = tuple(range(problem.devices.count))
        for number, result in enumerate(reversed(problem.results), 1):
            group = names[result.producer]
            words = f"result of {group}", "send results", group
            told[len(self.starts) - number] = *words, ("all devices",), everyone
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return tuple(_PlacedEvent(*told[task], *span) for task, span in enumerate(spans))

    def label(self, name: str, micro_batch: int) -> str:
        return f"{name} of micro-batch {micro_batch}" if self.micro_batches > 1 else name

    def _spans_of(self, mask: np.ndarray) -> tuple[tuple[float, float], ...]:
        mask &= self.ends > self.starts
        return joined(zip(self.starts[mask].tolist(), self.ends[mask].tolist(), strict=True))

    def busy(self, device: int) -> tuple[tuple[float, float], ...]:
        """Return the (start, end) intervals in seconds in which a device computes."""
        return self._spans_of(self.tasks.columns[-2] == device)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """For each device, the total time in seconds in which it computes."""
        return tuple(length_s(self.busy(d)) for d in range(self.problem.devices.count))

    def messages_of(self, device: int) -> tuple[tuple[float, float], ...]:
        """Return the (start, end) intervals in seconds in which a device's messages are in flight."""
        return self._spans_of(np.array([device in event.ends for event in self.events], dtype=bool))

    def communication_s(self, device: int) -> float:
        return length_s(self.messages_of(device))

    @property
    def excess_bytes(self) -> Floats:
        """(devices,) bytes by which each device's peak exceeds its capacity; negative if it has room."""
        return np.array(self.peak_bytes) - self.problem.devices.capacity_bytes

    def fits(self) -> bool:
        """Return whether no device's peak exceeds its capacity."""
        return bool((self.excess_bytes <= 0).all())


def simulate_placement(
    problem: PlacementProblem, placement: Placement, *, enforced: bool = True
) -> SimulatedPlacement:
    """Simulate one training step of a placement.

    Args:
        enforced: False lets devices run what is ready first, as frameworks do (FastT, section 6.3).

    Raises:
        PlanError: the placement does not fit the problem, or deadlocks.
    """
    placement.check(problem)
    tasks = StepTasks(*step_tasks(tuple(FlatProblem.of(problem)), *arrays_of(placement), enforced))
    seconds = tasks.columns[0]
    wrong = seconds[~(np.isfinite(seconds) & (seconds >= 0))]
    if len(wrong):
        raise PlanError(
            f"an operator or a message of a placement takes {wrong[0]} s; durations are finite and at least 0"
        )
    starts, ends, order = take_place(*tasks.columns)
    if len(order) < len(starts):
        ran = set(order.tolist())
        stuck = [problem.names[o % problem.size] for o, task in enumerate(tasks.forward) if task not in ran]
        raise PlanError(
            f"{len(starts) - len(order)} tasks wait for each other in a cycle, among them the forwards of "
            f"{', '.join(stuck[:3]) or 'none'}; give an order without a cycle"
        )
    memory = _StepMemory(problem, placement, tasks, enforced, order.tolist(), ends)
    return SimulatedPlacement(
        problem, placement, tasks, starts, ends, memory.order, memory.holdings(), memory.transfers()
    )


def _numbered(messages: np.ndarray) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield ((tensor, device), task) for each message."""
    for number, device in np.argwhere(messages >= 0).tolist():
        yield (number, device), int(messages[number, device])


class _StepMemory:
    """The memory in use during a step, computed from the order in which its tasks run and end.

    With several micro-batches, it works on the :attr:`~.PlacementProblem.repeated` problem and placement.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        placement: Placement,
        tasks: StepTasks,
        enforced: bool,
        order: Sequence[int],
        ends: np.ndarray,
    ):
        self.one, self.of_one, self.problem = problem, placement, problem.repeated
        self.placement = repeat_placement(placement, problem.micro_batches)
        self.enforced, self.order, self.tasks = enforced, order, tasks
        self.rank: list[int] = np.argsort(order).tolist()
        # In the order of their ends; tasks that end together in the order in which they ran.
        self.ended: list[int] = np.argsort(sorted(order, key=ends.tolist().__getitem__)).tolist()
        self.forward, self.backward = tasks.forward.tolist(), tasks.backward.tolist()
        self.arrival, self.returned = dict(_numbered(tasks.arrival)), dict(_numbered(tasks.returned))
        # The devices that each tensor is sent to.
        self.copies: list[list[int]] = [[] for _ in self.problem.tensors]
        for number, device in self.arrival:
            self.copies[number].append(device)
        self.alive: list[_Holding] = []
        self.gradients: list[_GradientStorage] = []
        self.sums: dict[tuple[int, int], float] = {}
        """(tensor, device) -> the bytes of the tensor's complete gradient there."""
        self.given = Counter[int]()
        """Task of a backward -> the bytes of the gradients that it makes."""
        self.summed = Counter[int]()
        """Task of a backward -> the bytes of sums to which its gradients are added."""
        self.additions: dict[int, list[tuple[float, _GradientStorage | None, _GradientStorage]]]
        self.additions = defaultdict(list)
        """Task of a backward -> sums of gradients from other devices right before it: the bytes of the
        messages, the local gradient if it is not summed yet, the sum."""

    def transfers(self) -> tuple[TensorTransfer, ...]:
        """Return the messages of the first micro-batch, in the order in which they start."""
        messages = {i: self._transfer(*key, back=False) for key, i in self.arrival.items()}
        messages |= {i: self._transfer(*key, back=True) for key, i in self.returned.items()}
        of_one = (messages[i] for i in self.order if i in messages)
        return tuple(transfer for transfer in of_one if transfer.tensor < len(self.one.tensors))

    def _transfer(self, tensor: int, device: int, *, back: bool) -> TensorTransfer:
        producer = self.placement.device[self.problem.tensors[tensor].producer]
        source, target = (device, producer) if back else (producer, device)
        return TensorTransfer(tensor, source, target, back)

    def holdings(self) -> list[_Holding]:
        problem, place = self.problem, self.placement
        stored = (problem.parameter_bytes, problem.gradient_bytes, problem.optimizer_bytes)
        for operator, sizes in enumerate(zip(*(each.tolist() for each in stored), strict=True)):
            for kind, size in enumerate(sizes):
                if size:
                    holding = place.device[operator], kind, size, -1, -1, operator, -1, MEMORY_KINDS[kind]
                    self.alive.append(_Holding(*holding))
        room = self._room()
        forward_peaks, kept_bytes = problem.forward_peak_bytes.tolist(), problem.kept_bytes.tolist()
        for operator, device in enumerate(place.device):
            forward, owner = self.forward[operator], (operator, -1)
            self._hold(device, _TRANSIENT, forward_peaks[operator], [forward], owner, "workspace")
            if self.backward:
                tasks, what = [forward, self.backward[operator]], "saved inside for backward"
                self._hold(device, _KEPT, kept_bytes[operator], tasks, owner, what)
        for (number, device), (users, kept) in self._uses_of_storages().items():
            tensor = problem.tensors[number]
            message = self.arrival.get((number, device))
            first = self.forward[tensor.producer] if message is None else room[message]
            size = tensor.bytes
            if device == place.device[tensor.producer]:
                # A whole parameter that its own device reads is stored already.
                size = 0 if tensor.stored else tensor.bytes if tensor.extent is None else tensor.extent
            label = "activation" if device == place.device[tensor.producer] else "copy of another device's"
            kind = _KEPT if kept else _TRANSIENT
            self._hold(device, kind, size, [first, *users, *kept], (tensor.producer, number), label)
        if problem.training:
            self._hold_gradients(room)
        for number, (producer, size, _) in enumerate(reversed(self.one.results), 1):
            task = len(self.order) - number
            for device in range(problem.devices.count):
                self._hold(device, _TRANSIENT, size, [task], (producer, -1), "result")
        # The optimizer runs over all parameters of the device at once, so that its temporaries add up.
        peaks = np.bincount(place.device, problem.update_peak_bytes, problem.devices.count)
        for device, task in enumerate(self.tasks.update.tolist()):
            if task >= 0:
                self._hold(device, _TRANSIENT, peaks[device], [task], (-1, -1), "optimizer's temporaries")
        return self.alive

    def _hold(
        self, device: int, kind: int, size: float, tasks: Sequence[int], owner: tuple[int, int], what: str
    ) -> None:
        """Record memory of an (operator, tensor) from the first task's start until all tasks have ended."""
        if size:
            last = max(tasks, key=self.ended.__getitem__)
            self.alive.append(_Holding(device, kind, float(size), tasks[0], last, *owner, what))

    def _uses_of_storages(self) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        problem, place = self.problem, self.placement
        uses: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for number, tensor in enumerate(problem.tensors):
            for device in (place.device[tensor.producer], *self.copies[number]):
                storage = number
                while (into := problem.tensors[storage].lies_in) is not None:
                    if place.device[problem.tensors[storage].producer] != device:
                        break  # a copy
                    storage = into
                users, kept = uses.setdefault((storage, device), ([], []))
                users += self._users(number, device)
                if self.backward:
                    kept += [self.backward[o] for o in tensor.kept_by if place.device[o] == device]
        return uses

    def _users(self, number: int, device: int) -> list[int]:
        tensor, place = self.problem.tensors[number], self.placement
        readers = [self.forward[r] for r in tensor.readers if place.device[r] == device]
        made_there = place.device[tensor.producer] == device
        return readers + ([self.arrival[number, d] for d in self.copies[number]] if made_there else [])

    def _room(self) -> dict[int, int]:
        """Return, for each message, the task at whose start its receiver allocates the buffer."""
        if not self.enforced:
            return {message: message for message in (*self.arrival.values(), *self.returned.values())}
        problem, count = self.one, self.one.micro_batches
        tensors, size = problem.tensors, problem.size
        makers, gradient = [t.producer for t in tensors], [t.gradient for t in tensors]
        flow = Flow(problem.names, problem.read, makers, gradient)
        room: dict[int, int] = {}
        for messages, tasks, back in (
            (self.arrival, self.forward, False),
            (self.returned, self.backward, True),
        ):
            started = {i: key for key, i in messages.items()}
            first = [started[i] for i in self.order if i in started and started[i][0] < len(tensors)]
            routes = [self._transfer(*key, back=back) for key in first]
            waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for is_operator, number in ordered(flow, self.of_one, routes, backward=back) if tasks else ():
                if not is_operator:
                    waiting[routes[number].target].append(first[number])
                    continue
                for tensor, device in waiting.pop(self.of_one.device[number], ()):
                    for i in range(count):
                        message = messages[tensor + i * len(tensors), device]
                        room[message] = tasks[number + i * size]
        return room

    def _hold_gradients(self, room: Mapping[int, int]) -> None:
        problem, place = self.problem, self.placement
        self._make_gradients(room)
        for made in self.gradients:
            owner = problem.tensors[made.tensor].producer, made.tensor
            self._hold(made.device, _TRANSIENT, made.bytes, made.tasks, owner, "gradient")
        for operator, peak in enumerate(problem.backward_peak_bytes.tolist()):
            device, backward = place.device[operator], self.backward[operator]
            if backward in self.summed:
                # Sums are made when backward is over, and what it saved and was given is freed.
                given = sum(self.sums[n, device] for n in problem.made[operator] if (n, device) in self.sums)
                peak = max(peak - self.summed[backward], -problem.kept_bytes[operator] - given)
            if backward in self.additions:
                peak = max(peak, self._adding_bytes(backward))
            self._hold(device, _TRANSIENT, peak, [backward], (operator, -1), "workspace of backward")

    def _adding_bytes(self, backward: int) -> float:
        most, alive, rank = 0.0, 0.0, self.rank
        for messages_bytes, share, made in reversed(self.additions[backward]):
            alive += messages_bytes
            if share is not None and all(rank[task] < rank[backward] for task in share.tasks):
                alive += share.bytes
            most = max(most, alive)
            alive -= made.bytes
        return most - self.given[backward]

    def _new_gradient(self, tensor: int, device: int, size: float, first: int) -> _GradientStorage:
        self.gradients.append(_GradientStorage(tensor, device, size, [first]))
        return self.gradients[-1]

    def _make_gradients(self, room: Mapping[int, int]) -> None:
        """Find the memory of all gradients, each the sum of one share per reader.

        As in ``Tape.add``, the first share is stored without a copy, and the second allocates a sum. Shares
        from other devices are added last, right before the backward that needs the gradient.
        """
        problem, place, rank = self.problem, self.placement, self.rank
        # The task that a device runs before each of its backwards.
        before: dict[int, int] = {}
        for forwards, order in zip(place.forward, place.backward, strict=True):
            tasks = [*(self.forward[o] for o in forwards[-1:]), *(self.backward[o] for o in order)]
            before |= zip(tasks[1:], tasks, strict=False)

        for number, tensor in enumerate(problem.tensors):
            if not tensor.gradient:
                continue
            for device in (*self.copies[number], place.device[tensor.producer]):
                made_there = place.device[tensor.producer] == device
                end = self.backward[tensor.producer] if made_there else self.returned[number, device]
                readers = (self.backward[r] for r in tensor.readers if place.device[r] == device)
                made = [
                    (task, self._new_gradient(number, device, tensor.bytes, task))
                    for task in sorted(readers, key=rank.__getitem__)
                ]
                self.given.update({task: tensor.bytes for task, _ in made})
                shares_there = len(made)
                if made_there:
                    arrived = sorted(
                        (self.returned[number, d] for d in self.copies[number]), key=rank.__getitem__
                    )
                    size = tensor.bytes
                    made += [(end, self._new_gradient(number, device, size, room[task])) for task in arrived]
                if not made:
                    continue
                gradient = made[0][1]
                if len(made) > 1:
                    # Messages are waited for and added before the backward that needs the sum, and are freed
                    # by then.
                    added = [
                        task if n < shares_there else before.get(end, end) for n, (task, _) in enumerate(made)
                    ]
                    gradient.tasks.append(added[1])
                    first_share = made[0][1] if shares_there == 1 else None
                    gradient = self._new_gradient(number, device, tensor.bytes, made[1][0])
                    if shares_there > 1:
                        self.summed[made[1][0]] += tensor.bytes
                    if len(made) > shares_there:
                        messages_bytes = tensor.bytes * (len(made) - shares_there)
                        self.additions[end].append((messages_bytes, first_share, gradient))
                    for task, (_, storage) in zip(added[1:], made[1:], strict=True):
                        storage.tasks.append(task)
                    for _, storage in made[shares_there:]:
                        if storage.tasks[0] == end:  # received, added and freed before anything else
                            storage.bytes = 0
                gradient.tasks.append(end)
                self.sums[number, device] = tensor.bytes
