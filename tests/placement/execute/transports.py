"""Ranks as threads of this process that meet for every message: a send ends when it is received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensoropt.placement.execute.transport import Transfer

WAIT_S = 120.0


class Switchboard:
    """Where threads meet, once per message."""

    def __init__(self, ranks: int):
        self.changed = threading.Condition()
        self.asked: set[int] = set()
        self.given: dict[int, torch.Tensor] = {}
        self.together = threading.Barrier(ranks, timeout=WAIT_S)
        self.shared: torch.Tensor | None = None

    def wait_for(self, met: Callable[[], bool], what: str) -> None:
        assert self.changed.wait_for(met, timeout=WAIT_S), f"waited for ever for {what}"


class Meeting:
    """One rank's :class:`~tensoropt.placement.execute.transport.Transport`."""

    def __init__(self, board: Switchboard, rank: int):
        self.board, self.rank = board, rank
        self.sent: list[Transfer] = []

    def send(self, transfer: Transfer, value: torch.Tensor) -> None:
        self.sent.append(transfer)
        with self.board.changed:
            self.board.given[transfer.number] = value.detach().clone()
            self.board.changed.notify_all()
            self.board.wait_for(lambda: transfer.number in self.board.asked, f"a receiver of {transfer}")

    def receive(
        self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arrival:
        with self.board.changed:
            self.board.asked.add(transfer.number)
            self.board.changed.notify_all()
        return Arrival(self.board, transfer, tuple(shape), dtype)

    def broadcast(self, value: torch.Tensor, source: int) -> torch.Tensor:
        if self.rank == source:
            self.board.shared = value.detach().clone()
        self.board.together.wait()
        assert self.board.shared is not None
        value.copy_(self.board.shared)
        self.board.together.wait()
        return value

    def finish(self) -> None:
        return


class Arrival:
    def __init__(self, board: Switchboard, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype):
        self.board, self.transfer, self.shape, self.dtype = board, transfer, shape, dtype

    def wait(self) -> torch.Tensor:
        number = self.transfer.number
        with self.board.changed:
            self.board.wait_for(lambda: number in self.board.given, f"a sender of {self.transfer}")
            value = self.board.given.pop(number)
        assert value.shape == self.shape
        assert value.dtype == self.dtype
        return value


def on_threads(ranks: int, work: Callable[[int, Meeting], Any]) -> list[Any]:
    """``work(rank, transport)`` on every rank; the first error is raised."""
    board = Switchboard(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = work(rank, Meeting(board, rank))
        except BaseException as error:
            errors.append(error)
            board.together.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
