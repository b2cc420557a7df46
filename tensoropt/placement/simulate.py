"""The simulator for placed plans: devices and links as timelines, every tensor from first to last use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from tensoropt.placement.order import Flow, TensorTransfer, ordered
from tensoropt.placement.problem import Placement, PlacementProblem, repeat_placement
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.simulate.timeline import Holding, Task, Timeline, joined, length_s, schedule

_OPTIMIZER_TEMPORARIES = "optimizer's temporaries"
"""The label of what the optimizer needs while it runs."""


@cache
def device_name(device: int) -> str:
    return f"device {device}"


class _Holder(NamedTuple):
    """The owner of a holding's bytes: the operator, its tensor (or itself again), and a label."""

    operator: str
    tensor: str
    what: str


@dataclass(slots=True)
class _GradientStorage:
    """The storage of gradients: first tensor, the task that makes it, the tasks until which it lives."""

    tensor: int
    device: int
    bytes: float
    first: int
    users: list[int] = field(default_factory=list)


class _Addition(NamedTuple):
    """Gradients from other devices, added right before the backward of the tensor's producer.

    Attributes:
        messages_bytes: those of the received gradients.
        share: the local gradient, if it was not summed yet.
        made: the sum.
    """

    messages_bytes: float
    share: _GradientStorage | None
    made: _GradientStorage


class _GradientMemory(NamedTuple):
    """The memory of gradients.

    Attributes:
        sums: (tensor, device) -> the storage of its complete gradient there.
        given: for each backward, the bytes of its gradients.
        summed: for each backward, (existing share, new share, sum).
        additions: for each backward, those right before it.
    """

    storages: list[_GradientStorage]
    sums: dict[tuple[int, int], _GradientStorage]
    given: Counter[int]
    summed: dict[int, list[tuple[_GradientStorage, ...]]]
    additions: dict[int, list[_Addition]]

    def adding_bytes(self, backward: int, rank: Sequence[int]) -> float:
        most, alive = 0.0, 0.0
        for messages_bytes, share, made in reversed(self.additions[backward]):
            alive += messages_bytes
            if share is not None and all(rank[user] < rank[backward] for user in share.users):
                alive += share.bytes
            most = max(most, alive)
            alive -= made.bytes
        return most - self.given[backward]


@dataclass(frozen=True)
class SimulatedPlacement:
    """One simulated training step of a placement.

    Attributes:
        timeline: all tasks, with the memory that each allocates and frees.
        transfers: those of one micro-batch, in the order in which the first one's start.
        host_s: by device, the host's seconds to launch its work; 0 on CPUs.
    """

    problem: PlacementProblem
    placement: Placement
    timeline: Timeline
    transfers: tuple[TensorTransfer, ...]
    host_s: tuple[float, ...]

    @property
    def micro_batches(self) -> int:
        return self.problem.micro_batches

    @property
    def time_s(self) -> float:
        """Seconds of the step, the slower of devices and hosts."""
        return max(self.timeline.total_s, *self.host_s, 0.0)

    @cached_property
    def peaks(self) -> tuple[dict[str, float], ...]:
        """The bytes by kind at each device's peak."""
        return tuple(
            {kind: float(peak.get(kind, 0.0)) for kind in MEMORY_KINDS}
            for peak in (self.timeline.peak(device_name(d))[1] for d in range(self.problem.devices.count))
        )

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        return tuple(sum(peak.values()) for peak in self.peaks)

    @property
    def memory_bytes(self) -> float:
        return max(self.peak_bytes)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """The seconds in which each device computes."""
        return tuple(
            length_s(self.timeline.busy([device_name(d)])) for d in range(self.problem.devices.count)
        )

    @cached_property
    def busiest_lane(self) -> tuple[str, float]:
        """The busiest lane, and its seconds; the first of equals by name."""
        seconds: dict[str, float] = defaultdict(float)
        for event in self.timeline.events:
            if event.task.phase.startswith("send"):
                for lane in event.task.resources:
                    seconds[lane] += event.task.duration_s
        return min(seconds.items(), key=lambda item: (-item[1], item[0]), default=("no link", 0.0))

    def messages_of(self, device: int) -> tuple[tuple[float, float], ...]:
        """Return the spans with a message to or from a device in flight."""
        name = device_name(device)
        return joined(
            (e.start_s, e.end_s) for e in self.timeline.events if name in e.task.ends and e.task.duration_s
        )

    def communication_s(self, device: int) -> float:
        return length_s(self.messages_of(device))

    def fits(self, limit_bytes: float | None = None) -> bool:
        """Return whether every device keeps within its capacity and a limit."""
        most = self.problem.devices.within(limit_bytes)
        return all(peak <= room for peak, room in zip(self.peak_bytes, most.tolist(), strict=True))


def simulate_placement(
    problem: PlacementProblem, placement: Placement, *, enforced: bool = True
) -> SimulatedPlacement:
    """Simulate one training step of a placement.

    Args:
        enforced: False lets devices run the first ready operator, as frameworks do (FastT, section 6.3).

    Raises:
        PlanError: the placement does not fit the problem, or deadlocks.
    """
    placement.check(problem)
    simulated = _step_simulation(problem, placement, enforced=enforced).simulate()
    if problem.micro_batches == 1:
        return simulated
    first = tuple(t for t in simulated.transfers if t.tensor < len(problem.tensors))
    return SimulatedPlacement(problem, placement, simulated.timeline, first, simulated.host_s)


def holders(simulated: SimulatedPlacement) -> tuple[Timeline, list[tuple[_Holder, str]]]:
    """Return the timeline with a kind of memory for every holding, and their owners by number."""
    simulation = _step_simulation(simulated.problem, simulated.placement, enforced=True)
    return simulation.owners(simulated.timeline)


def _step_simulation(problem: PlacementProblem, placement: Placement, *, enforced: bool) -> _StepSimulation:
    if problem.micro_batches == 1:
        return _StepSimulation(problem, placement, enforced)
    repeated = repeat_placement(placement, problem.micro_batches)
    return _StepSimulation(problem.repeated, repeated, enforced, of_one=problem.size)


def _positions(order: Sequence[int]) -> list[int]:
    positions = [0] * len(order)
    for position, number in enumerate(order):
        positions[number] = position
    return positions


@dataclass
class _StepSimulation:
    """The tasks of one step. ``of_one``: the operators per micro-batch, if there are several; else 0."""

    problem: PlacementProblem
    placement: Placement
    enforced: bool
    of_one: int = 0
    tasks: list[Task] = field(default_factory=list)
    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[int, ...]] = field(default_factory=list)
    """The devices that each tensor is sent to."""
    arrival: dict[tuple[int, int], int] = field(default_factory=dict)
    """(tensor, device) -> the task that receives it."""
    returned: dict[tuple[int, int], int] = field(default_factory=dict)
    """(tensor, device) -> the task that returns its gradient."""
    results: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Broadcast task -> the producer and bytes of the result."""
    updates: dict[int, Holding] = field(default_factory=dict)
    """Optimizer task -> its temporaries."""
    work_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """(phase, operator) -> its seconds with its messages' ends."""
    host_s: list[float] = field(default_factory=list)
    """The host's seconds of each device."""
    owned: list[tuple[_Holder, str]] | None = None
    """If collected, the owner of each holding and its kind; kinds are then numbers."""

    def simulate(self) -> SimulatedPlacement:
        problem, place = self.problem, self.placement
        self._make_tasks()
        # Memory follows time: only once the tasks are scheduled is it known which user of a tensor is the
        # last.
        timeline = self._holding(schedule(self.tasks, slower=problem.devices.slower))
        messages = {i: self._transfer(*key, back=False) for key, i in self.arrival.items()}
        messages |= {i: self._transfer(*key, back=True) for key, i in self.returned.items()}
        transfers = tuple(messages[i] for i in timeline.order if i in messages)
        return SimulatedPlacement(problem, place, timeline, transfers, tuple(self.host_s))

    def _transfer(self, tensor: int, device: int, *, back: bool) -> TensorTransfer:
        producer = self.placement.device[self.problem.tensors[tensor].producer]
        source, target = (device, producer) if back else (producer, device)
        return TensorTransfer(tensor, source, target, back)

    def owners(self, timeline: Timeline) -> tuple[Timeline, list[tuple[_Holder, str]]]:
        self.owned = []
        self._make_tasks()
        return self._holding(timeline), self.owned

    def _holding(self, timeline: Timeline) -> Timeline:
        return replace(timeline, tasks=self._with_memory(timeline), initial=tuple(self._stored()))

    # -- tasks ------------------------------------------------------------------------------------

    def _make_tasks(self) -> None:
        self._number()
        self._count_work()
        self._forward()
        if self.problem.training:
            self._backward()
            self._update()
        self._hand_out()

    def _kind(self, kind: str, operator: int | None, tensor: int | None, label: str) -> str:
        if self.owned is None:
            return kind
        problem = self.problem
        name = "" if operator is None else problem.names[operator]
        subject = name if tensor is None else problem.tensors[tensor].name
        if operator is not None:
            subject = self._label(subject, operator)
        self.owned.append((_Holder(name, subject, label), kind))
        return str(len(self.owned) - 1)

    def _number(self) -> None:
        """Number all tasks: operators, messages, backward, update."""
        problem, place = self.problem, self.placement
        # Numbered before any is made, as tasks name others that come later: backward waits for gradients on
        # their way. The methods below append in this very order.
        position = 0
        for order in place.forward:
            for operator in order:
                self.forward[operator] = position
                position += 1
        for number, tensor in enumerate(problem.tensors):
            source = place.device[tensor.producer]
            self.copies.append(tuple(sorted({place.device[r] for r in tensor.readers} - {source})))
            for device in self.copies[number]:
                self.arrival[number, device] = position
                position += 1
        if not problem.training:
            return
        for order in place.backward_orders:
            for operator in order:
                self.backward[operator] = position
                position += 1
        for number, device in self.arrival:
            if problem.tensors[number].gradient:
                self.returned[number, device] = position
                position += 1

    def _count_work(self) -> None:
        """Compute the seconds of operators and hosts with the ends of messages."""
        problem, place, work = self.problem, self.placement, self.work_s
        devices = problem.devices.count
        self.host_s = [0.0] * devices
        for operator, device in enumerate(place.device):
            work["forward", operator] = float(problem.forward_s[operator, device])
            work["backward", operator] = float(problem.backward_s[operator, device])
            if problem.host_s is not None:
                self.host_s[device] += float(problem.host_s[operator, device])
        if problem.devices.ends is None:
            return
        ends = problem.devices.end_seconds.tolist()

        def take_in(phase: str, operator: int, device: int, size: float) -> None:
            end_s, per_byte, _, _, host_s, _ = ends[device]
            work[phase, operator] += end_s + size * per_byte
            self.host_s[device] += host_s

        for number, device in self.arrival:
            tensor = problem.tensors[number]
            source = place.device[tensor.producer]
            readers = [r for r in tensor.readers if place.device[r] == device]
            take_in("forward", tensor.producer, source, 0.0)
            take_in("forward", min(readers, key=self.forward.__getitem__), device, tensor.bytes)
        for number, device in self.returned:
            tensor = problem.tensors[number]
            source = place.device[tensor.producer]
            readers = [r for r in tensor.readers if place.device[r] == device]
            take_in("backward", max(readers, key=self.backward.__getitem__), device, 0.0)
            take_in("backward", tensor.producer, source, tensor.bytes)
            # The first share becomes the gradient as it is.
            if device != self.copies[number][0] or any(place.device[r] == source for r in tensor.readers):
                _, _, add_s, per_byte, _, host_s = ends[source]
                work["backward", tensor.producer] += add_s + tensor.bytes * per_byte
                self.host_s[source] += host_s

    def _forward(self) -> None:
        problem, place = self.problem, self.placement
        for device, order in enumerate(place.forward):
            previous: list[int] = []
            for operator in order:
                after = list(previous)
                for number in problem.read[operator]:
                    producer = problem.tensors[number].producer
                    is_local = place.device[producer] == device
                    after.append(self.forward[producer] if is_local else self.arrival[number, device])
                self._add(operator, device, self.work_s["forward", operator], after, "forward")
                # Without an enforced order only the device's resource keeps its operators apart, and
                # whichever is ready first takes it.
                previous = [self.forward[operator]] if self.enforced else []
        for number, device in self.arrival:
            self._send(number, device, [self.forward[problem.tensors[number].producer]], "send")

    def _backward(self) -> None:
        problem, place = self.problem, self.placement
        for device, order in enumerate(place.backward_orders):
            # A device begins backward after its last forward operator, as one process that runs both does.
            forwards = [self.forward[o] for o in place.forward[device]]
            previous = forwards[-1:] if self.enforced else []
            for operator in order:
                after = [*previous, self.forward[operator]]
                # Its gradient is complete when every reader has added to it, those elsewhere by one message.
                for number in problem.made[operator]:
                    tensor = problem.tensors[number]
                    if tensor.gradient:
                        after += [self.backward[r] for r in tensor.readers if place.device[r] == device]
                        after += [self.returned[number, d] for d in self.copies[number]]
                self._add(operator, device, self.work_s["backward", operator], after, "backward")
                previous = [self.backward[operator]] if self.enforced else []
        for number, device in self.returned:
            readers = [r for r in problem.tensors[number].readers if place.device[r] == device]
            self._send(number, device, [self.backward[r] for r in readers], "send gradient")

    def _update(self) -> None:
        problem, place = self.problem, self.placement
        for device, order in enumerate(place.backward_orders):
            seconds = sum(float(problem.update_s[o, device]) for o in order)
            peaks = problem.update_peak_bytes
            # The optimizer runs over all parameters of the device at once, so that its temporaries add up.
            peak = 0.0 if peaks is None else sum(float(peaks[o]) for o in order)
            if seconds or peak:
                # Backward is over when all that the device has sent is gone (``Transport.finish``).
                sent = [i for (_, where), i in self.returned.items() if where == device]
                sent += [
                    i
                    for (number, _), i in self.arrival.items()
                    if place.device[problem.tensors[number].producer] == device
                ]
                after = (*(self.backward[o] for o in order), *sent)
                kind = self._kind("transient", None, None, _OPTIMIZER_TEMPORARIES)
                self.updates[len(self.tasks)] = (device_name(device), kind, peak)
                self.tasks.append(
                    Task(
                        name="optimizer",
                        duration_s=seconds,
                        resources=(device_name(device),),
                        after=after,
                        phase="optimizer",
                    )
                )

    def _hand_out(self) -> None:
        forward = tuple(self.forward.values())
        for producer, size, seconds in self.problem.results:
            self.results[len(self.tasks)] = (producer, size)
            self.tasks.append(
                Task(
                    name=f"result of {self.problem.names[producer]}",
                    duration_s=seconds,
                    resources=("all devices",),
                    after=forward,
                    phase="send results",
                    group=self.problem.names[producer],
                    ends=tuple(map(device_name, range(self.problem.devices.count))),
                )
            )

    def _add(self, operator: int, device: int, seconds: float, after: list[int], phase: str) -> None:
        name = self.problem.names[operator]
        self.tasks.append(
            Task(
                name=self._label(name, operator),
                duration_s=seconds,
                resources=(device_name(device),),
                after=tuple(dict.fromkeys(after)),
                phase=phase,
                group=name,
            )
        )

    def _send(self, number: int, device: int, after: list[int], phase: str) -> None:
        tensor, devices = self.problem.tensors[number], self.problem.devices
        ends = (self.placement.device[tensor.producer], device)
        source, target = ends if phase == "send" else ends[::-1]
        self.tasks.append(
            Task(
                name=self._label(tensor.name, tensor.producer),
                duration_s=devices.transfer_s(tensor.bytes, source, target),
                resources=devices.lanes_of(source, target),
                after=tuple(dict.fromkeys(after)),
                phase=phase,
                group=self.problem.names[tensor.producer],
                ends=(device_name(source), device_name(target)),
            )
        )

    def _label(self, name: str, operator: int) -> str:
        return f"{name} of micro-batch {operator // self.of_one}" if self.of_one else name

    # -- memory -----------------------------------------------------------------------------------

    def _stored(self) -> list[Holding]:
        problem, holdings = self.problem, []
        stored = (problem.parameter_bytes, problem.gradient_bytes, problem.optimizer_bytes)
        sizes = zip(*(each.tolist() for each in stored), strict=True)
        for operator, (device, of_operator) in enumerate(zip(self.placement.device, sizes, strict=True)):
            for kind, size in zip(MEMORY_KINDS[:3], of_operator, strict=True):
                if size:
                    named = self._kind(kind, operator, None, kind)
                    holdings.append((device_name(device), named, float(size)))
        return holdings

    def _with_memory(self, timeline: Timeline) -> list[Task]:
        problem, place, training = self.problem, self.placement, self.problem.training
        takes: list[list[Holding]] = [[] for _ in self.tasks]
        gives: list[list[Holding]] = [[] for _ in self.tasks]
        rank = _positions(timeline.order)
        # In the order of their ends; tasks that end together in the order in which they ran.
        ended = _positions(sorted(timeline.order, key=timeline.ends.__getitem__))
        room = self._room(timeline)

        def hold(device: int, kind: str, size: float, first: int, users: Sequence[int] = ()) -> None:
            if size:
                holding = (device_name(device), kind, float(size))
                takes[first].append(holding)
                gives[max((first, *users), key=ended.__getitem__)].append(holding)

        forward_peaks, kept_bytes = problem.forward_peak_bytes.tolist(), problem.kept_bytes.tolist()
        for operator, device in enumerate(place.device):
            forward, backward = self.forward[operator], self.backward.get(operator)
            kind = self._kind("transient", operator, None, "workspace")
            hold(device, kind, forward_peaks[operator], forward)
            if backward is not None:
                kind = self._kind("kept", operator, None, "saved inside for backward")
                hold(device, kind, kept_bytes[operator], forward, [backward])
        for (number, device), (users, kept) in self._uses_of_storages().items():
            tensor = problem.tensors[number]
            message = self.arrival.get((number, device))
            first = self.forward[tensor.producer] if message is None else room[message]
            size = tensor.bytes
            if device == place.device[tensor.producer]:
                # A whole parameter that its own device reads is stored already.
                size = 0 if tensor.stored else tensor.bytes if tensor.extent is None else tensor.extent
            label = "activation" if device == place.device[tensor.producer] else "copy of another device's"
            kind = self._kind("kept" if kept else "transient", tensor.producer, number, label)
            hold(device, kind, size, first, [*users, *kept])
        if training:
            self._hold_gradients(hold, rank, room)
        for task, (producer, size) in self.results.items():
            for device in range(problem.devices.count):
                hold(device, self._kind("transient", producer, None, "result"), size, task)
        for task, holding in self.updates.items():
            takes[task].append(holding)
            gives[task].append(holding)
        return [
            task._replace(allocates=tuple(begun), frees=tuple(over))
            for task, begun, over in zip(timeline.tasks, takes, gives, strict=True)
        ]

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

    def _room(self, timeline: Timeline) -> dict[int, int]:
        """Return, for each message, the task with which its receiver allocates its buffer."""
        if not self.enforced:
            return {message: message for message in (*self.arrival.values(), *self.returned.values())}
        problem, place = self.problem, self.placement
        size = self.of_one or problem.size
        count = problem.size // size
        tensors = problem.tensors[: len(problem.tensors) // count]
        one = Placement(
            place.device[:size],
            *(
                tuple(tuple(o for o in order if o < size) for order in orders)
                for orders in (place.forward, place.backward_orders)
            ),
        )
        flow = Flow(
            problem.names[:size],
            problem.read[:size],
            [tensor.producer for tensor in tensors],
            [tensor.gradient for tensor in tensors],
        )
        room: dict[int, int] = {}
        for messages, tasks, back in (
            (self.arrival, self.forward, False),
            (self.returned, self.backward, True),
        ):
            started = {i: key for key, i in messages.items()}
            first = [started[i] for i in timeline.order if i in started and started[i][0] < len(tensors)]
            routes = [self._transfer(*key, back=back) for key in first]
            waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for is_operator, number in ordered(flow, one, routes, backward=back) if tasks else ():
                if not is_operator:
                    waiting[routes[number].target].append(first[number])
                    continue
                for tensor, device in waiting.pop(place.device[number], ()):
                    for i in range(count):
                        message = messages[tensor + i * len(tensors), device]
                        room[message] = tasks[number + i * size]
        return room

    def _hold_gradients(
        self, hold: Callable[..., None], rank: Sequence[int], room: Mapping[int, int]
    ) -> None:
        problem, place = self.problem, self.placement
        memory = self._gradient_memory(rank, room)
        for storage in memory.storages:
            number = storage.tensor
            kind = self._kind("transient", problem.tensors[number].producer, number, "gradient")
            hold(storage.device, kind, storage.bytes, storage.first, storage.users)
        peaks, handed = problem.backward_peak_bytes.tolist(), problem.handed_peak_bytes
        for operator, device in enumerate(place.device):
            backward, peak = self.backward[operator], peaks[operator]
            incoming = [memory.sums[n, device] for n in problem.made[operator] if (n, device) in memory.sums]
            outlasts = any(rank[user] > rank[backward] for gradient in incoming for user in gradient.users)
            if outlasts and handed is not None:
                peak = float(handed[operator])
            if backward in memory.summed:
                # Sums are made when it is over, and what it kept and was given is gone.
                used = [storage for added in memory.summed[backward] for storage in added]
                gone = [] if outlasts else [g for g in incoming if not any(g is storage for storage in used)]
                most = -float(problem.kept_bytes[operator]) - sum(g.bytes for g in gone)
                peak = max(peak - sum(made.bytes for *_, made in memory.summed[backward]), most)
            if backward in memory.additions:
                peak = max(peak, memory.adding_bytes(backward, rank))
            kind = self._kind("transient", operator, None, "workspace of backward")
            hold(device, kind, peak, backward)

    def _gradient_memory(self, rank: Sequence[int], room: Mapping[int, int]) -> _GradientMemory:
        """Return the memory of all gradients.

        As in ``Tape.add``, a first share is kept as it is, and a second makes a new sum; shares of other
        devices are added last, right before the backward that needs them.
        """
        problem, place = self.problem, self.placement
        storages: list[_GradientStorage] = []
        sums: dict[tuple[int, int], _GradientStorage] = {}
        given = Counter[int]()
        summed: dict[int, list[tuple[_GradientStorage, ...]]] = defaultdict(list)
        additions: dict[int, list[_Addition]] = defaultdict(list)
        # The task that a device runs before each of its backwards.
        before: dict[int, int] = {}
        for forwards, order in zip(place.forward, place.backward_orders, strict=True):
            tasks = [*(self.forward[o] for o in forwards[-1:]), *(self.backward[o] for o in order)]
            before |= zip(tasks[1:], tasks, strict=False)
        shares: dict[tuple[int, int], _GradientStorage | None] = {}

        def new(tensor: int, device: int, size: float, first: int) -> _GradientStorage:
            storages.append(_GradientStorage(tensor, device, size, first))
            return storages[-1]

        def share(number: int, reader: int) -> _GradientStorage | None:
            """Return the storage of a reader's share of a tensor's gradient; None if it has none."""
            if (number, reader) not in shares:
                shares[number, reader] = made_by(number, reader)
            return shares[number, reader]

        def made_by(number: int, reader: int) -> _GradientStorage | None:
            tensor, device = problem.tensors[number], place.device[reader]
            size = tensor.gradient_extents.get(reader, tensor.bytes)
            if not size:
                return None
            target = tensor.gradients_in.get(reader)
            if target is not None:
                of_reader = problem.tensors[target].producer == reader
                lies_in = sums.get((target, device)) if of_reader else share(target, reader)
                if lies_in is not None:
                    return lies_in
            given[self.backward[reader]] += size
            return new(number, device, size, self.backward[reader])

        # A reader's results come after its operands, so that their gradients are known first.
        for number, tensor in sorted(enumerate(problem.tensors), key=lambda item: -item[1].producer):
            if not tensor.gradient:
                continue
            for device in (*self.copies[number], place.device[tensor.producer]):
                made_there = place.device[tensor.producer] == device
                end = self.backward[tensor.producer] if made_there else self.returned[number, device]
                made = [
                    (self.backward[r], lies_in)
                    for r in tensor.readers
                    if place.device[r] == device and (lies_in := share(number, r)) is not None
                ]
                made.sort(key=lambda item: rank[item[0]])
                shares_there = len(made)
                if made_there:
                    arrived = sorted(
                        (self.returned[number, d] for d in self.copies[number]), key=rank.__getitem__
                    )
                    made += [(end, new(number, device, tensor.bytes, room[task])) for task in arrived]
                if not made:
                    continue
                gradient = made[0][1]
                if len(made) > 1:
                    # Messages are waited for, and added, when their reader comes to it, and are gone by then.
                    added = [
                        task if n < shares_there else before.get(end, end) for n, (task, _) in enumerate(made)
                    ]
                    gradient.users.append(added[1])
                    first_share = made[0][1] if shares_there == 1 else None
                    gradient = new(number, device, tensor.bytes, made[1][0])
                    if shares_there > 1:
                        summed[made[1][0]].append((made[0][1], made[1][1], gradient))
                    if len(made) > shares_there:
                        messages_bytes = tensor.bytes * (len(made) - shares_there)
                        additions[end].append(_Addition(messages_bytes, first_share, gradient))
                    for task, (_, storage) in zip(added[1:], made[1:], strict=True):
                        storage.users.append(task)
                    for _, storage in made[shares_there:]:
                        if storage.first == end:  # it comes, is added and is gone before anything else
                            storage.bytes = 0
                gradient.users.append(end)
                sums[number, device] = gradient
        return _GradientMemory(storages, sums, given, summed, additions)
