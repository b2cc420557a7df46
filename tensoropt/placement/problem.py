"""The placement problem, which a placing planner is given, and the placement that it returns.

Both are numbers only, so that random graphs serve as well as models. An operator here is whatever is placed
as a unit: a group of the model's operators, a piece of one, an operator that cuts or joins pieces, or a
variable that several operators read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from tensoropt.errors import PlanError
from tensoropt.types import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor between operators.

    Attributes:
        producer: the operator that makes it.
        readers: the operators that read it, each once, ascending. Empty for a result of the model.
        kept_by: those of the producer and the readers whose backward needs it.
        gradient: whether a gradient of the same size comes back.
        stored: whether it is a parameter of its producer as it lies there, so that it takes no more memory on
            its producer's device.
        lies_in: the tensor that its producer reads, or makes before, in whose storage it lies there; None if
            it has a storage of its own. Elsewhere it is a copy.
        extent: bytes of its storage on its producer's device if these differ from its own: those of the
            larger storage of which it is a view, or 0 for a view of a parameter, an input or a constant.
        gradients_in: for each reader whose backward makes no storage for its share of the gradient, the
            tensor in whose gradient the share lies: one that the reader makes (a sum hands its gradient to
            every operand), or another that it reads.
        gradient_extents: for each reader whose share lies in a storage of another size, its bytes; 0 for a
            reader that has no share.
    """

    name: str
    bytes: int
    producer: int
    readers: tuple[int, ...]
    kept_by: tuple[int, ...] = ()
    gradient: bool = True
    stored: bool = False
    lies_in: int | None = None
    extent: int | None = None
    gradients_in: Mapping[int, int] = field(default_factory=dict, hash=False)
    gradient_extents: Mapping[int, int] = field(default_factory=dict, hash=False)


class MessageEnds(NamedTuple):
    """What messages cost the devices at their ends, in addition to the links: (d,) seconds.

    Attributes:
        end_s: the device's time for either end.
        receive_s_per_byte: for copying what comes to where it is read.
        add_s, add_s_per_byte: for adding a gradient that comes to others.
        host_end_s, host_add_s: the host's time to issue an end, and an addition.
    """

    end_s: Floats
    receive_s_per_byte: Floats
    add_s: Floats
    add_s_per_byte: Floats
    host_end_s: Floats
    host_add_s: Floats


@dataclass(frozen=True, kw_only=True)
class DeviceSet:
    """Devices, and the time to send between them.

    Attributes:
        capacity_bytes: (d,) the bytes of tensors that each device may hold.
        latency_s, seconds_per_byte: (d, d), 0 on the diagonal; a message of b bytes from i to j takes
            ``latency_s[i, j] + b * seconds_per_byte[i, j]``.
        terms: the bytes that a process takes of each device beside tensors, by name
            (:mod:`tensoropt.costs.process_memory`); the capacity is already without them.
        order: the devices, best first, for operators without pins; None for their own order.
        lanes: for each ordered pair (i, j), the names of what the message occupies; messages that share a
            lane queue. Pairs without an entry occupy a lane of their own.
        ends: what messages cost the devices at their ends; None for nothing.
        slower: how much longer, as a share, computing takes beside a message; infinite where nothing is
            computed meanwhile.
    """

    capacity_bytes: Floats
    latency_s: Floats
    seconds_per_byte: Floats
    lanes: dict[tuple[int, int], tuple[str, ...]]
    terms: Mapping[str, float] = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    ends: MessageEnds | None = None
    slower: float = 0.0

    @property
    def best_first(self) -> tuple[int, ...]:
        """The devices, best first, for operators without pins."""
        return tuple(range(self.count)) if self.order is None else self.order

    def within(self, limit_bytes: float | None) -> Floats:
        """Return the bytes of tensors that each device may hold, (d,), if it may use at most ``limit_bytes``
        in total.
        """
        if limit_bytes is None:
            return self.capacity_bytes.astype(float)
        room = max(limit_bytes - sum(self.terms.values()), 0.0)
        return np.minimum(self.capacity_bytes.astype(float), room)

    def in_all(self, tensor_bytes: float) -> float:
        """Return the total bytes of ``tensor_bytes`` of tensors and everything else that a process takes,
        which is what limits count.
        """
        return tensor_bytes + sum(self.terms.values())

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.capacity_bytes)

    def transfer_s(self, num_bytes: float, source: int, target: int) -> float:
        """Return the seconds of one message between two devices; 0 on one device."""
        if source == target:
            return 0.0
        return float(self.latency_s[source, target] + num_bytes * self.seconds_per_byte[source, target])

    @cached_property
    def end_seconds(self) -> Floats:
        """The seconds at the ends of messages: (d, 6), as :class:`MessageEnds` lists them."""
        if self.ends is None:
            return np.zeros((self.count, len(MessageEnds._fields)))
        return np.stack([np.asarray(seconds, dtype=float) for seconds in self.ends], axis=1)

    def lanes_of(self, source: int, target: int) -> tuple[str, ...]:
        """Return the names of the lanes that a message between two devices occupies."""
        return self.lanes.get((source, target), (f"link {source}->{target}",))


class PlacedResult(NamedTuple):
    """A result of the model.

    Attributes:
        producer: the operator that makes it.
        bytes: its bytes, for the whole batch.
        seconds: the seconds to give it to all devices.
    """

    producer: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Operators to place on devices. All arrays are in bytes and seconds.

    Attributes:
        names: (n,), in an order in which every tensor is made before it is read.
        forward_s, backward_s: (n, d) seconds by operator and device; backward is 0 in inference.
        update_s: (n, d) the optimizer's step over the operator's parameters.
        parameter_bytes, gradient_bytes, optimizer_bytes: (n,) alive from start to end.
        kept_bytes: (n,) made inside, kept from forward to backward; tensors between operators are not
            counted here but by ``kept_by``.
        forward_peak_bytes, backward_peak_bytes: (n,) alive while the operator runs, in addition to kept
            tensors, the tensors it reads and makes, and their gradients; below 0 for a backward that releases
            some of these before it makes others.
        handed_peak_bytes: (n,) the same for backward if a gradient that it is given outlasts it, in a
            gradient that it has handed on; None if that makes no difference.
        tensors: the tensors between operators.
        update_peak_bytes: (n,) taken by the optimizer's step for the operator's parameters while it runs; by
            all operators of a device at once. None for nothing.
        together: sets of operators that must share a device.
        pinned: operator -> the devices it may lie on, best first: a set for methods that know costs, an order
            for the Placer.
        references: for each variable the operators that refer to it, if there are several: the one that holds
            it, or makes its new value, first. TensorFlow's Placer keeps them together.
        host_s: (n, d) the host's seconds to issue everything that an operator does in a step, all
            micro-batches and the optimizer included; None where the host is the device.
        micro_batches: the number of micro-batches into which a step's batch is cut. Other seconds, and bytes
            of operators and tensors, are those of one of them; stored tensors, and the optimizer's step,
            occur once.
        results: the results given to all devices after forward, for the whole batch.
    """

    names: tuple[str, ...]
    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    parameter_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats
    kept_bytes: Floats
    forward_peak_bytes: Floats
    backward_peak_bytes: Floats
    tensors: tuple[PlacedTensor, ...]
    devices: DeviceSet
    training: bool = True
    update_peak_bytes: Floats | None = None
    handed_peak_bytes: Floats | None = None
    together: tuple[tuple[int, ...], ...] = ()
    pinned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    host_s: Floats | None = None
    micro_batches: int = 1
    results: tuple[PlacedResult, ...] = ()

    def __post_init__(self) -> None:
        assert self.micro_batches >= 1, "a step has at least one micro-batch"
        for tensor in self.tensors:
            # All planners rely on the operators' numbers being a topological order.
            if any(reader <= tensor.producer for reader in tensor.readers):
                raise PlanError(
                    f"tensor {tensor.name} is read by an operator listed before its producer "
                    f"{self.names[tensor.producer]}; list operators in an order of execution"
                )

    @property
    def size(self) -> int:
        """The number of operators."""
        return len(self.names)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each operator makes."""
        tensors_of: list[list[int]] = [[] for _ in self.names]
        for number, tensor in enumerate(self.tensors):
            tensors_of[tensor.producer].append(number)
        return tuple(map(tuple, tensors_of))

    @cached_property
    def read(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each operator reads."""
        tensors_of: list[list[int]] = [[] for _ in self.names]
        for number, tensor in enumerate(self.tensors):
            for reader in tensor.readers:
                tensors_of[reader].append(number)
        return tuple(map(tuple, tensors_of))

    @cached_property
    def stored_bytes(self) -> Floats:
        """The bytes that lie on the operator's device from start to end, (n,)."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @cached_property
    def repeated(self) -> PlacementProblem:
        """The problem that :func:`repeat_problem` makes of this one, of which planners simulate many
        placements."""
        return repeat_problem(self)

    def step_bytes(self, operator: int) -> float:
        """Return the bytes that an operator adds to its device for a whole step: its stored tensors, and the
        kept tensors of all micro-batches, whose forwards all run before the first backward.

        This is the planners' additive estimate; a tensor kept by its producer or by readers beside it counts
        once, at the producer. The simulator follows lifetimes instead.
        """
        # At the producer, since it lies somewhere, whichever readers keep it; copies on other devices are not
        # counted.
        tensors = (self.tensors[t] for t in self.made[operator])
        kept = self.kept_bytes[operator] + sum(t.bytes for t in tensors if t.kept_by and not t.stored)
        return float(self.stored_bytes[operator] + self.micro_batches * kept)


@dataclass(frozen=True)
class Placement:
    """A device for every operator, and for each device the order in which it runs its operators.

    Attributes:
        device: (n,) the device of each operator.
        forward: the operators of each device in their order of execution.
        backward: the same for backward; None for the reverse of ``forward``.
    """

    device: tuple[int, ...]
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...] | None = None

    @property
    def backward_orders(self) -> tuple[tuple[int, ...], ...]:
        """The operators of each device in the order in which their backward runs."""
        if self.backward is not None:
            return self.backward
        return tuple(tuple(reversed(order)) for order in self.forward)

    @classmethod
    def in_order(cls, device: Sequence[int], count: int, order: Sequence[int] | None = None) -> Placement:
        """Return the placement on these devices, all of which follow one order: by default that of the
        operators.
        """
        forward: list[list[int]] = [[] for _ in range(count)]
        for operator in order if order is not None else range(len(device)):
            forward[device[operator]].append(operator)
        return cls(tuple(int(d) for d in device), tuple(map(tuple, forward)))

    def check(self, problem: PlacementProblem) -> None:
        """Raise :class:`PlanError` unless every operator runs once, on its device, where it may lie."""
        for orders in (self.forward, self.backward_orders):
            listed = sorted((o, d) for d, order in enumerate(orders) for o in order)
            if len(orders) != problem.devices.count or listed != list(enumerate(self.device)):
                raise PlanError(
                    "a placement must list every operator once, in the order of the device it lies on"
                )
        for group in problem.together:
            if len({self.device[o] for o in group}) > 1:
                names = ", ".join(problem.names[o] for o in group)
                raise PlanError(f"operators that belong together lie on several devices: {names}")
        for operator, allowed in problem.pinned:
            if self.device[operator] not in allowed:
                raise PlanError(
                    f"operator {problem.names[operator]} lies on device {self.device[operator]} but may "
                    f"only lie on {', '.join(map(str, allowed))}"
                )


def common_devices(orders: Sequence[Sequence[int]], otherwise: Sequence[int]) -> tuple[int, ...]:
    """Return the devices that occur in all of the orders, best first: as the orders have them if they agree,
    otherwise as ``otherwise`` has them.

    The rule for priorities of TensorFlow's Placer (``MergeSupportedDevices`` of colocation_graph.cc).
    """
    common = set.intersection(*map(set, orders))
    agreed = {tuple(device for device in order if device in common) for order in orders}
    return agreed.pop() if len(agreed) == 1 else tuple(device for device in otherwise if device in common)


def repeat_problem(problem: PlacementProblem) -> PlacementProblem:
    """Return the problem of a one-batch step in which everything occurs once for each of its micro-batches.

    Operator ``o`` of micro-batch ``i`` is operator ``i * n + o``, and likewise for tensors. Stored tensors,
    and the optimizer's step over them, occur once, with the first micro-batch.
    """

    count = problem.micro_batches

    def each(values: Floats) -> Floats:
        return np.concatenate([values] * count)

    def once(values: Floats) -> Floats:
        return np.concatenate([values, *[np.zeros_like(values)] * (count - 1)])

    size, peaks, handed = problem.size, problem.update_peak_bytes, problem.handed_peak_bytes
    host_s = problem.host_s
    copies = range(count)
    return replace(
        problem,
        names=problem.names * count,
        forward_s=each(problem.forward_s),
        backward_s=each(problem.backward_s),
        update_s=once(problem.update_s),
        parameter_bytes=once(problem.parameter_bytes),
        gradient_bytes=once(problem.gradient_bytes),
        optimizer_bytes=once(problem.optimizer_bytes),
        kept_bytes=each(problem.kept_bytes),
        forward_peak_bytes=each(problem.forward_peak_bytes),
        backward_peak_bytes=each(problem.backward_peak_bytes),
        tensors=tuple(
            _shifted(tensor, i * size, i * len(problem.tensors)) for i in copies for tensor in problem.tensors
        ),
        update_peak_bytes=None if peaks is None else once(peaks),
        host_s=None if host_s is None else once(host_s),
        handed_peak_bytes=None if handed is None else each(handed),
        # An operator lies where its parameters do, in every micro-batch.
        together=tuple(
            tuple(i * size + o for i in copies for o in operators) for operators in problem.together
        ),
        pinned=tuple((i * size + o, allowed) for i in copies for o, allowed in problem.pinned),
        micro_batches=1,
    )


def _shifted(tensor: PlacedTensor, operators: int, tensors: int) -> PlacedTensor:
    return replace(
        tensor,
        producer=tensor.producer + operators,
        readers=tuple(r + operators for r in tensor.readers),
        kept_by=tuple(o + operators for o in tensor.kept_by),
        lies_in=None if tensor.lies_in is None else tensor.lies_in + tensors,
        gradients_in={r + operators: t + tensors for r, t in tensor.gradients_in.items()},
        gradient_extents={r + operators: size for r, size in tensor.gradient_extents.items()},
    )


def repeat_placement(placement: Placement, count: int) -> Placement:
    """Return the placement of the problem that :func:`repeat_problem` makes: each device runs its order once
    for every micro-batch."""
    size = len(placement.device)

    def repeated(order: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chain.from_iterable((i * size + o for o in order) for i in range(count)))

    return Placement(
        placement.device * count,
        tuple(map(repeated, placement.forward)),
        # Given even if it mirrors forward: the reverse of everything would begin with the last micro-batch.
        tuple(map(repeated, placement.backward_orders)),
    )
