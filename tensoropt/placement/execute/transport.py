"""The ways in which values get from one process to another, and the record of each message."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensoropt.placement.execute.order import Transfer


class Arriving(Protocol):
    """A message under way."""

    def wait(self) -> torch.Tensor:
        """Return the tensor, once it has arrived."""
        ...


class Transport(Protocol):
    """The communication that an engine needs with other processes. All take part in the same transfers in the
    same order."""

    def send(self, transfer: Transfer, value: torch.Tensor) -> None:
        """Begin to send; the value is kept until it is sent."""
        ...

    def receive(
        self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        """Begin to receive."""
        ...

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        """Give all processes what ``source`` has in ``value``, in place."""
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


def through_host(device: torch.device) -> bool:
    """Return whether a message between this job's ranks has to pass through the host's memory.

    Gloo's collectives copy GPU tensors there and back themselves; its messages do not: they read the address
    that they are given (``ProcessGroupGloo::send`` and ``recv``).
    """
    return device.type != "cpu" and dist.get_backend() == "gloo"


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
        value = (value.cpu() if through_host(value.device) else value).contiguous()
        # The tag matches a send with its receive under gloo; NCCL ignores tags and matches by order, which is
        # the same on all ranks.
        work = dist.isend(value, transfer.target, tag=transfer.number)
        assert work is not None, "every rank is a member of the job"
        if value.is_cuda:
            # NCCL's process group keeps the value until its message is gone. Kept here as well, it would be
            # there until the host, which is far ahead of the device, looks again.
            self._on_gpu = [one for one in self._on_gpu if not one.is_completed()]
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
        lies_on = torch.device("cpu") if through_host(device) else device
        value = torch.empty(tuple(shape), dtype=dtype, device=lies_on)
        return _Received(dist.irecv(value, transfer.source, tag=transfer.number), value, device)

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
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
