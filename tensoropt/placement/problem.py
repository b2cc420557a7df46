"""The placement problem as numbers, and its solution: each operator's device and each device's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensoropt.errors import PlanError
from tensoropt.types import Floats

PER_MICRO_BATCH = ("forward_s", "backward_s", "kept_bytes", "forward_peak_bytes", "backward_peak_bytes")
PER_STEP = ("update_s", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "update_peak_bytes", "host_s")
"""Fields of :class:`PlacementProblem` with a row per operator: above per micro-batch, here per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor between operators of a placement problem.

    Attributes:
        producer: the number of the operator that makes the tensor.
        readers: the numbers of the operators that read it, ascending. Empty for a result of the model.
        kept_by: the operators, among its producer and readers, whose backward needs it.
        gradient: whether its readers return a gradient, which has the same size.
        stored: whether it is a stored parameter, which takes no further memory on its producer's device.
        lies_in: the tensor of which it is a view on its producer's device; None if it has its own storage.
        extent: the size in bytes of that storage, None if it is ``bytes``; 0 for a view of stored data.
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


@dataclass(frozen=True, kw_only=True)
class DeviceSet:
    """The devices of a placement problem, and the costs of messages between them.

    Attributes:
        capacity_bytes: (d,) the bytes of tensors that each device may hold.
        latency_s, seconds_per_byte: (d, d), 0 on the diagonal; a message of b bytes from i to j takes
            ``latency_s[i, j] + b * seconds_per_byte[i, j]``.
        terms: name -> a process's memory in bytes besides tensors, which the capacity does not include.
        order: the devices, best first; None for ascending numbers.
        lanes: pair of devices -> the lanes (parts of links) on which its messages queue; by default its own.
        ends: (d, 6) seconds that messages take on a device, besides the links; None for 0. The device's time
            per sent or received message, per received byte (a copy), per added gradient, per added byte. The
            host's time to launch a send or receive, and to launch an addition.
        slower: the share by which a message slows down computation; infinite if it blocks computation.
    """

    capacity_bytes: Floats
    latency_s: Floats
    seconds_per_byte: Floats
    lanes: dict[tuple[int, int], tuple[str, ...]]
    terms: Mapping[str, float] = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    ends: Floats | None = None
    slower: float = 0.0

    @property
    def best_first(self) -> tuple[int, ...]:
        return tuple(range(self.count)) if self.order is None else self.order

    def within(self, limit_bytes: float | None) -> Floats:
        """Return (d,) the bytes for tensors on each device if a process may use ``limit_bytes`` in total."""
        if limit_bytes is None:
            return self.capacity_bytes.astype(float)
        room = max(limit_bytes - sum(self.terms.values()), 0.0)
        return np.minimum(self.capacity_bytes.astype(float), room)

    def in_all(self, tensor_bytes: float) -> float:
        """Return the total memory in bytes of a process whose tensors take ``tensor_bytes``."""
        return tensor_bytes + sum(self.terms.values())

    @property
    def count(self) -> int:
        return len(self.capacity_bytes)

    def transfer_s(self, num_bytes: float, source: int, target: int) -> float:
        """Return the duration in seconds of one message between two devices; 0 on the same device."""
        if source == target:
            return 0.0
        return float(self.latency_s[source, target] + num_bytes * self.seconds_per_byte[source, target])

    def lanes_of(self, source: int, target: int) -> tuple[str, ...]:
        return self.lanes.get((source, target), (f"link {source}->{target}",))


class PlacedResult(NamedTuple):
    """A result of the model, which is broadcast to all devices.

    Attributes:
        bytes: its size in bytes, for the whole batch.
        seconds: the duration of its broadcast.
    """

    producer: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Operators to place on devices, with their durations in seconds and sizes in bytes.

    Attributes:
        names: (n,) in an order in which every tensor is made before it is read.
        forward_s, backward_s: (n, d) durations on each device; backward is 0 in inference.
        update_s: (n, d) the optimizer's step over the operator's parameters.
        parameter_bytes, gradient_bytes, optimizer_bytes: (n,) memory in use during the whole step.
        kept_bytes: (n,) memory saved inside an operator for backward, without tensors between operators.
        forward_peak_bytes, backward_peak_bytes: (n,) memory in use while an operator runs, besides saved
            tensors, tensors read and made, and their gradients; negative if backward frees some first.
        update_peak_bytes: (n,) the optimizer's temporaries, which add up over all operators of a device.
        host_s: (n, d) the host's seconds to launch an operator in a whole step; 0 on CPUs.
        tensors: the tensors between operators.
        together: sets of operators that must share a device.
        pinned: operator -> its allowed devices, best first.
        references: for each parameter or buffer with several users, its owner, then the other users, as
            TensorFlow's Placer groups them.
        micro_batches: the number of micro-batches. Unless stated otherwise, durations and sizes of operators
            and tensors are those of one micro-batch.
        results: the results broadcast after forward, for the whole batch.
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
    update_peak_bytes: Floats
    host_s: Floats
    tensors: tuple[PlacedTensor, ...]
    devices: DeviceSet
    training: bool = True
    together: tuple[tuple[int, ...], ...] = ()
    pinned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
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
        return len(self.names)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        tensors_of: list[list[int]] = [[] for _ in self.names]
        for number, tensor in enumerate(self.tensors):
            tensors_of[tensor.producer].append(number)
        return tuple(map(tuple, tensors_of))

    @cached_property
    def read(self) -> tuple[tuple[int, ...], ...]:
        tensors_of: list[list[int]] = [[] for _ in self.names]
        for number, tensor in enumerate(self.tensors):
            for reader in tensor.readers:
                tensors_of[reader].append(number)
        return tuple(map(tuple, tensors_of))

    @cached_property
    def stored_bytes(self) -> Floats:
        """(n,) the bytes of parameters, gradients and optimizer state, in use during the whole step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """(n, d) whether an operator may run on a device: kernels exist and it is not pinned elsewhere."""
        # Times of inf say that a device cannot run an operator.
        allowed = np.isfinite(self.forward_s + self.backward_s + self.update_s)
        for operator, devices in self.pinned:
            allowed[operator] &= np.isin(range(self.devices.count), devices)
        return allowed

    @cached_property
    def repeated(self) -> PlacementProblem:
        """An equal problem of one micro-batch, which has a copy of each operator and tensor per micro-batch.

        Operator ``o`` of micro-batch ``i`` has number ``i * n + o``, and tensors likewise. Stored tensors and
        the optimizer's step belong to the first micro-batch.
        """
        if self.micro_batches == 1:
            return self
        size, count, copies = self.size, self.micro_batches, range(self.micro_batches)
        columns: dict[str, Any] = {}
        for name in (*PER_MICRO_BATCH, *PER_STEP):
            values = getattr(self, name)
            further = np.zeros_like(values) if name in PER_STEP else values
            columns[name] = np.concatenate([values, *[further] * (count - 1)])
        return replace(
            self,
            **columns,
            names=self.names * count,
            tensors=tuple(
                _shifted(tensor, i * size, i * len(self.tensors)) for i in copies for tensor in self.tensors
            ),
            # An operator lies where its parameters do, in every micro-batch.
            together=tuple(
                tuple(i * size + o for i in copies for o in operators) for operators in self.together
            ),
            pinned=tuple((i * size + o, allowed) for i in copies for o, allowed in self.pinned),
            micro_batches=1,
        )

    def step_bytes(self, operator: int) -> float:
        """Return the bytes that an operator stores and saves, which additive models of memory sum up."""
        # Counted at the producer, whichever readers save it; copies on other devices are not counted.
        tensors = (self.tensors[t] for t in self.made[operator])
        kept = self.kept_bytes[operator] + sum(t.bytes for t in tensors if t.kept_by and not t.stored)
        return float(self.stored_bytes[operator] + self.micro_batches * kept)


@dataclass(frozen=True)
class Placement:
    """A device for every operator, and for each device the order of its operators.

    Attributes:
        device: the device of each operator.
        forward: for each device, its operators in the order of forward.
        backward: for each device, its operators in the order of backward; by default the reverse.
    """

    device: tuple[int, ...]
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.backward:
            object.__setattr__(self, "backward", tuple(order[::-1] for order in self.forward))

    @classmethod
    def in_order(
        cls,
        device: Iterable[int],
        count: int,
        ahead: Iterable[int] | None = None,
        back: Iterable[int] | None = None,
    ) -> Placement:
        """Return a placement in which all devices run their operators in the order of one list of operators.

        Args:
            ahead: all operators in the order of their forward; by default, by number.
            back: all operators in the order of their backward; None for the reverse.
        """
        devices = tuple(map(int, device))

        def orders(line: Iterable[int]) -> tuple[tuple[int, ...], ...]:
            rows: list[list[int]] = [[] for _ in range(count)]
            for operator in map(int, line):
                rows[devices[operator]].append(operator)
            return tuple(map(tuple, rows))

        forward = orders(range(len(devices)) if ahead is None else ahead)
        return cls(devices, forward, () if back is None else orders(back))

    @classmethod
    def by_start(
        cls, device: Sequence[int], count: int, ahead: Sequence[float], back: Sequence[float] | None = None
    ) -> Placement:
        """Return a placement in which devices run their operators in the order of the given start times."""
        operators = range(len(device))
        return cls.in_order(
            device,
            count,
            sorted(operators, key=lambda o: (ahead[o], o)),
            None if back is None else sorted(operators, key=lambda o: (back[o], -o)),
        )

    def check(self, problem: PlacementProblem) -> None:
        """Raise :class:`PlanError` unless every operator runs once, on an allowed device."""
        for orders in (self.forward, self.backward):
            listed = sorted((o, d) for d, order in enumerate(orders) for o in order)
            if len(orders) != problem.devices.count or listed != list(enumerate(self.device)):
                raise PlanError(
                    "a placement must list every operator once, in the order of the device that runs it"
                )
        for group in problem.together:
            if len({self.device[o] for o in group}) > 1:
                names = ", ".join(problem.names[o] for o in group)
                raise PlanError(f"operators that must share a device are placed on several: {names}")
        for operator, allowed in problem.pinned:
            if self.device[operator] not in allowed:
                raise PlanError(
                    f"operator {problem.names[operator]} is placed on device {self.device[operator]}, but is "
                    f"allowed only on {', '.join(map(str, allowed))}"
                )


def common_devices(orders: Sequence[Sequence[int]], otherwise: Sequence[int]) -> tuple[int, ...]:
    """Return the devices in all lists: in the lists' order if all agree on it, otherwise as in ``otherwise``.

    This is ``MergeSupportedDevices`` of TensorFlow's Placer (colocation_graph.cc).
    """
    common = set.intersection(*map(set, orders))
    agreed = {tuple(device for device in order if device in common) for order in orders}
    return agreed.pop() if len(agreed) == 1 else tuple(device for device in otherwise if device in common)


def _shifted(tensor: PlacedTensor, operators: int, tensors: int) -> PlacedTensor:
    return replace(
        tensor,
        producer=tensor.producer + operators,
        readers=tuple(r + operators for r in tensor.readers),
        kept_by=tuple(o + operators for o in tensor.kept_by),
        lies_in=None if tensor.lies_in is None else tensor.lies_in + tensors,
    )


def repeat_placement(placement: Placement, count: int) -> Placement:
    """Return the placement of a :attr:`~PlacementProblem.repeated` problem: each device repeats its order."""
    size = len(placement.device)

    def repeated(order: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chain.from_iterable((i * size + o for o in order) for i in range(count)))

    return Placement(
        placement.device * count,
        tuple(map(repeated, placement.forward)),
        # Given even if it mirrors forward: the reverse of everything would begin with the last micro-batch.
        tuple(map(repeated, placement.backward)),
    )
