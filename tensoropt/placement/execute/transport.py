"""The ways in which values get from one process to another, and the record of each message.

All operators and transfers of a placed plan have one order (:mod:`tensoropt.placement.order`), and each
process runs its part of it.
"""

from __future__ import annotations

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
from tensoropt.placement.order import Flow, TensorTransfer, ordered
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

    Raises:
        PlanError: the plan's transfers are not those its placement needs, or its orders wait for each other.
    """
    routes, graph = tuple(strategy.transfers), strategy.placed_graph
    _check(strategy, routes)
    values = {value.name: value for op in graph.operators for value in op.writes}
    number, tensors = {name: n for n, name in enumerate(values)}, graph.groups.atoms.graph.tensors
    makers = {value.name: n for n, op in enumerate(graph.operators) for value in op.writes}
    flow = Flow(
        [op.name for op in graph.operators],
        [[number[value.name] for value in op.reads] for op in graph.operators],
        [makers[name] for name in values],
        [tensors[value.tensor].requires_grad for value in values.values()],
    )
    transfers = [
        Transfer(i, values[name], source, target, back)
        for i, (name, source, target, back) in enumerate(routes)
    ]

    def of(*, backward: bool) -> tuple[_Instruction, ...]:
        own = [transfer for transfer in transfers if transfer.backward is backward]
        ways = [TensorTransfer(number[t.value.name], t.source, t.target, backward) for t in own]
        order = ordered(flow, strategy.placement, ways, backward=backward)
        return tuple(n if is_operator else own[n] for is_operator, n in order)

    training = graph.groups.atoms.graph.training
    return PlacedSchedule(of(backward=False), of(backward=True) if training else (), len(transfers))


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
