"""Ranks as threads of this process that meet for every message: a send ends when it is received."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensoropt.placement.execute.transport import Arriving
from tests.engine.threads import in_threads

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
        self.sent: list[int] = []

    def send(self, number: int, target: int, value: torch.Tensor) -> None:
        self.sent.append(number)
        with self.board.changed:
            self.board.given[number] = value.detach().clone()
            self.board.changed.notify_all()
            self.board.wait_for(lambda: number in self.board.asked, f"a receiver of message {number}")

    def receive(
        self, number: int, source: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        with self.board.changed:
            self.board.asked.add(number)
            self.board.changed.notify_all()

        def arrived() -> torch.Tensor:
            with self.board.changed:
                self.board.wait_for(lambda: number in self.board.given, f"a sender of message {number}")
                value = self.board.given.pop(number)
            assert (value.shape, value.dtype) == (torch.Size(shape), dtype)
            return value

        return arrived

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


def on_threads(ranks: int, work: Callable[[int, Meeting], Any]) -> list[Any]:
    """``work(rank, transport)`` on every rank; the first error is raised."""
    board = Switchboard(ranks)
    return in_threads(ranks, lambda rank: work(rank, Meeting(board, rank)), board.together.abort)
