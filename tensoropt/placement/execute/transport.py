"""Send and receive tensors between a plan's devices, in one process or between ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensoropt.engine import runtime

Arriving = Callable[[], torch.Tensor]
"""A message in flight: a function that waits for the tensor and returns it."""


class Transport(Protocol):
    """Communication between a plan's devices. All processes must call it in the same order."""

    def send(self, number: int, target: int, value: torch.Tensor) -> None:
        """Begin to send ``value`` to device ``target``, and hold a reference to it until it is sent."""
        ...

    def receive(
        self, number: int, source: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving: ...

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        """Broadcast a value from device ``source``, in place if it is contiguous."""
        ...

    def finish(self) -> None:
        """Wait until all messages are sent; RuntimeError if one failed."""
        ...


class Alone:
    """The transport of one process that runs all devices: copies instead of messages."""

    def __init__(self, devices: Sequence[torch.device]):
        self.devices = devices
        self._sent: dict[int, torch.Tensor] = {}

    def send(self, number: int, target: int, value: torch.Tensor) -> None:
        # Always a copy, also where two devices of a plan are one (all are the CPU): what a plan sends is a
        # tensor of its own on the other side.
        self._sent[number] = value.detach().to(self.devices[target], copy=True)

    def receive(
        self, number: int, source: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        return lambda: self._sent.pop(number)

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        return value

    def finish(self) -> None:
        return


class Job:
    """The transport between the ranks of a ``torch.distributed`` job; rank ``i`` runs device ``i``.

    For gloo, a thread holds each sent tensor until its send is over; for NCCL, the work objects do.
    """

    def __init__(self) -> None:
        self._sent: queue.Queue[Any] = queue.Queue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._on_gpu: list[Any] = []

    def send(self, number: int, target: int, value: torch.Tensor) -> None:
        value = (value.cpu() if runtime.through_host(value.device) else value).contiguous()
        # The tag matches a send with its receive under gloo; NCCL ignores tags and matches by order, which is
        # the same on all ranks.
        work = dist.isend(value, target, tag=number)
        assert work is not None, "every rank is a member of the job"
        if value.is_cuda:
            # NCCL's process group keeps the value until its message is gone. Kept here as well, it would be
            # there until the host, which is far ahead of the device, looks again.
            self._on_gpu = [sent for sent in self._on_gpu if not sent.is_completed()]
            self._on_gpu.append(work)
            return
        if dist.get_backend() == "fake":
            return  # it is gone already; a thread would keep it for a while, by chance
        if self._thread is None or not self._thread.is_alive():
            # A daemon thread, so that a message that never arrives does not keep the process from ending.
            self._thread = threading.Thread(target=self._wait_for_all, daemon=True, name="sent messages")
            self._thread.start()
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
            self._sent.task_done()

    def receive(
        self, number: int, source: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        lies_on = torch.device("cpu") if runtime.through_host(device) else device
        value = torch.empty(tuple(shape), dtype=dtype, device=lies_on)
        work = dist.irecv(value, source, tag=number)
        assert work is not None, "every rank is a member of the job"

        def wait() -> torch.Tensor:
            work.wait()
            return value.to(device)

        return wait

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        value = value.contiguous()
        dist.broadcast(value, source)
        return value

    def finish(self) -> None:
        for work in self._on_gpu:
            work.wait()
        self._on_gpu.clear()
        self._sent.join()
        if self._error is not None:
            # Raised once, and in the thread of the step: nobody sees an exception of the waiting thread.
            error, self._error = self._error, None
            raise error
