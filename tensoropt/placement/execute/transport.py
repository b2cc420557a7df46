"""The ways in which values get from one process to another, and the record of each message.

All operators and transfers of a placed plan have one order, and each process runs its part of it.

Operators wait for the values that they read, for the gradients of their results, and for the previous
operator on their device. Transfers wait for their value and for the previous transfer in the plan. If any
order satisfies this, processes that each follow their part of it never wait for each other forever, even if a
send ends only when it is received.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensoropt.engine import runtime
from tensoropt.errors import PlanError
from tensoropt.placement.graph import Value
from tensoropt.placement.strategy import PlacedStrategy, ValueTransfer, needed_routes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value, or with ``backward`` its gradient, sent from one device to another.

    Attributes:
        number: its position among all transfers of a step, the same on every rank; those of the first
            micro-batch come first.
    """

    number: int
    value: Value
    source: int
    target: int
    backward: bool

    def later(self, transfers: int) -> Transfer:
        """Return the same transfer in a later micro-batch, after ``transfers`` others."""
        return replace(self, number=self.number + transfers) if transfers else self


_Instruction = int | Transfer
"""An operator's position in the graph, or a transfer."""


@dataclass(frozen=True)
class PlacedSchedule:
    """A step: its instructions in an order that all devices can follow.

    With several micro-batches they follow ``forward`` once for each, then ``backward`` once for each. That,
    too, is a single order, so that no device waits forever.

    Attributes:
        transfers: the number of transfers in one micro-batch, forward and backward.
    """

    forward: tuple[_Instruction, ...]
    backward: tuple[_Instruction, ...]
    transfers: int = 0


def schedule_of(strategy: PlacedStrategy) -> PlacedSchedule:
    """Return the order of a step.

    How far devices are ahead of each other is estimated with operators of equal length and messages of none:
    a message is expected about when it can arrive, so that its receiver neither waits for it nor allocates
    its buffer too early.

    Raises:
        PlanError: the plan's transfers are not those its placement needs, or its orders wait for each other.
    """
    routes = tuple(strategy.transfers)
    _check(strategy, routes)
    values = {v.name: v for op in strategy.placed_graph.operators for v in op.writes}
    transfers = [
        Transfer(i, values[name], source, target, back)
        for i, (name, source, target, back) in enumerate(routes)
    ]
    training = strategy.graph.atoms.graph.training
    forward = _Ordering(strategy, [t for t in transfers if not t.backward], backward=False).ordered()
    backward = (
        _Ordering(strategy, [t for t in transfers if t.backward], backward=True).ordered() if training else ()
    )
    return PlacedSchedule(forward, backward, len(transfers))


def _check(strategy: PlacedStrategy, transfers: Sequence[ValueTransfer]) -> None:
    needed = needed_routes(strategy.placed_graph, strategy.placement)
    missing, more = set(needed) - set(transfers), set(transfers) - set(needed)
    for routes, words in ((missing, "lacks"), (more, "has a needless")):
        for name, source, target, back in sorted(routes):
            label = f"gradient of {name}" if back else name
            raise PlanError(
                f"the plan {words} transfer of the {label} from device {source} to device {target}; "
                "make the plan again"
            )
    if len(transfers) != len(needed):
        raise PlanError("the plan lists a transfer twice; make the plan again")


class _Ordering:
    """Kahn's algorithm by time: the nodes are operators (by position), followed by transfers."""

    def __init__(self, strategy: PlacedStrategy, transfers: Sequence[Transfer], *, backward: bool):
        self.strategy, self.transfers = strategy, transfers
        self.operators = strategy.placed_graph.operators
        self.device = strategy.placement.device
        self.first = len(self.operators)
        self.before: list[set[int]] = [set() for _ in range(self.first + len(transfers))]
        self.makers = {v: i for i, op in enumerate(self.operators) for v in op.writes}
        for stage in strategy.stages:
            for node, successor in itertools.pairwise(stage.backward if backward else stage.forward):
                self.before[successor].add(node)
        for i in range(1, len(transfers)):
            # Transfers keep the plan's order on all ranks, so that sends and receives between two of them
            # pair up.
            self.before[self.first + i].add(self.first + i - 1)
        (self._gradients if backward else self._values)()

    def _values(self) -> None:
        arrival = {(t.value, t.target): self.first + i for i, t in enumerate(self.transfers)}
        for i, t in enumerate(self.transfers):
            self.before[self.first + i].add(self.makers[t.value])
        for i, op in enumerate(self.operators):
            for value in op.reads:
                maker = self.makers[value]
                local = self.device[maker] == self.device[i]
                self.before[i].add(maker if local else arrival[value, self.device[i]])

    def _gradients(self) -> None:
        returned = {(t.value, t.source): self.first + i for i, t in enumerate(self.transfers)}
        tensors = self.strategy.graph.atoms.graph.tensors
        for i, op in enumerate(self.operators):
            # Each value once, as its gradient comes back once however often it is read.
            for value in dict.fromkeys(op.reads):
                if not tensors[value.tensor].requires_grad:
                    continue
                maker = self.makers[value]
                if self.device[maker] == self.device[i]:
                    self.before[maker].add(i)
                else:
                    message = returned[value, self.device[i]]
                    self.before[message].add(i)
                    self.before[maker].add(message)

    def ordered(self) -> tuple[_Instruction, ...]:
        """Return all nodes, each after those that it waits for.

        Raises:
            PlanError: some wait for each other.
        """
        waiting = [len(before) for before in self.before]
        after: list[list[int]] = [[] for _ in self.before]
        for node, before in enumerate(self.before):
            for neighbour in before:
                after[neighbour].append(node)
        start = [0] * len(waiting)
        # At one time transfers (False) come before operators, so that a message is on its way while its
        # device computes on.
        ready = [(0, node < self.first, node) for node, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order: list[_Instruction] = []
        while ready:
            time_s, is_operator, node = heapq.heappop(ready)
            order.append(node if is_operator else self.transfers[node - self.first])
            for neighbour in after[node]:
                # An operator takes one unit of time, a message none: see schedule_of.
                start[neighbour] = max(start[neighbour], time_s + is_operator)
                waiting[neighbour] -= 1
                if not waiting[neighbour]:
                    heapq.heappush(ready, (start[neighbour], neighbour < self.first, neighbour))
        if len(order) < len(waiting):
            stuck = [op.name for i, op in enumerate(self.operators) if waiting[i]]
            names = ", ".join(stuck[:3]) or "transfers"
            raise PlanError(
                f"the plan's orders wait for each other for ever, among them {names}; make the plan again"
            )
        return tuple(order)


class Arriving(Protocol):
    """A message in flight."""

    def wait(self) -> torch.Tensor:
        """Return the tensor, once it has arrived."""
        ...


class Transport(Protocol):
    """The communication between an engine and other processes. All take part in the same transfers in the
    same order.
    """

    def send(self, transfer: Transfer, value: torch.Tensor) -> None:
        """Begin to send; the value is kept until it is sent."""
        ...

    def receive(
        self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        """Begin to receive."""
        ...

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        """Return the value of ``source`` on all processes, in place where the value is contiguous."""
        ...

    def finish(self) -> None:
        """Wait until everything is sent.

        Raises:
            RuntimeError: a message could not be sent.
        """
        ...


class Alone:
    """The transport of one process that runs all devices: nothing leaves it."""

    def send(self, transfer: Transfer, value: torch.Tensor) -> None:
        raise AssertionError("a process that runs all devices sends nothing")

    def receive(
        self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        raise AssertionError("a process that runs all devices receives nothing")

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        return value

    def finish(self) -> None:
        return


class _Received:
    def __init__(self, work: Any, value: torch.Tensor, device: torch.device):
        self.work, self.value, self.device = work, value, device

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.value.to(self.device)


class Job:
    """The messages between the ranks of a ``torch.distributed`` job; rank ``i`` runs device ``i``.

    Gloo reports that a message was sent only to a thread that waits for it, so one does, and then releases
    the value. NCCL's work objects hold what they send themselves.
    """

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._left = 0
        self._gone = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._on_gpu: list[Any] = []

    def send(self, transfer: Transfer, value: torch.Tensor) -> None:
        value = (value.cpu() if runtime.through_host(value.device) else value).contiguous()
        # The tag matches a send with its receive under gloo; NCCL ignores tags and matches by order, which is
        # the same on all ranks.
        work = dist.isend(value, transfer.target, tag=transfer.number)
        assert work is not None, "every rank is a member of the job"
        if value.is_cuda:
            # NCCL's process group keeps the value until its message is gone. Kept here as well, it would be
            # there until the host, which is far ahead of the device, looks again.
            self._on_gpu = [sent for sent in self._on_gpu if not sent.is_completed()]
            self._on_gpu.append(work)
            return
        if self._thread is None or not self._thread.is_alive():
            # A daemon thread, so that a message that never arrives does not keep the process from ending.
            self._thread = threading.Thread(target=self._wait_for_all, daemon=True, name="sent messages")
            self._thread.start()
        with self._gone:
            self._left += 1
        self._sent.put((work, value))

    def _wait_for_all(self) -> None:
        while True:
            work, value = self._sent.get()
            try:
                work.wait()
            except Exception as error:
                self._error = self._error or error
            # Otherwise the last message would stay alive until the next one is sent.
            del work, value
            with self._gone:
                self._left -= 1
                self._gone.notify_all()

    def receive(
        self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        lies_on = torch.device("cpu") if runtime.through_host(device) else device
        value = torch.empty(tuple(shape), dtype=dtype, device=lies_on)
        return _Received(dist.irecv(value, transfer.source, tag=transfer.number), value, device)

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        value = value.contiguous()
        dist.broadcast(value, source)
        return value

    def finish(self) -> None:
        for work in self._on_gpu:
            work.wait()
        self._on_gpu.clear()
        with self._gone:
            self._gone.wait_for(lambda: self._left == 0)
        if self._error is not None:
            # Raised once, and in the thread of the step: nobody sees an exception of the waiting thread.
            error, self._error = self._error, None
            raise error
