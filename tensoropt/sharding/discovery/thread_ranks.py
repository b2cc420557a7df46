"""Ranks as threads of one process: the contexts in which rule checks run local kernels."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective that a kernel issued."""

    axes: tuple[int, ...]
    elements: int
    integer_bytes: int
    backward: bool

    def described(self, element_bytes: int) -> tuple[str, tuple[int, ...], int, bool]:
        """The collective as a local call with floating-point values of this width declares it (checks run in
        float64)."""
        size = self.integer_bytes or self.elements * element_bytes
        return "all_reduce", self.axes, size, self.backward


class ThreadedRanks:
    """All ranks of a mesh. Collectives meet at a barrier; every rank must issue the same sequence."""

    def __init__(self, mesh: Sequence[int]):
        self.mesh = tuple(mesh)
        self.places = list(itertools.product(*(range(size) for size in mesh)))
        self.sent: dict[tuple[int, ...], list[Sent]] = {at: [] for at in self.places}
        self._barrier = threading.Barrier(len(self.places))
        self._board: dict[tuple[int, ...], torch.Tensor] = {}

    def run(self, work: Callable[[Context], T], *, parallel: bool) -> dict[tuple[int, ...], T]:
        """Call ``work(context)`` on every rank; one after another if nothing can be sent.

        Raises:
            the first rank's exception; the others are released from their barrier.
        """
        contexts = [ThreadedRanks.Context(self, at) for at in self.places]
        if not parallel or len(contexts) == 1:
            return {context.at: work(context) for context in contexts}
        results: dict[tuple[int, ...], T] = {}
        errors: list[BaseException] = []

        def guarded(context: ThreadedRanks.Context) -> None:
            try:
                results[context.at] = work(context)
            except BaseException as error:
                errors.append(error)
                # Otherwise the others would wait forever for this rank's next collective.
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(context,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            # A broken barrier only says that some other rank failed.
            real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            raise (real or errors)[0]
        return results

    class Context:
        """One rank's :class:`tensoropt.ops.context.ShardContext`."""

        def __init__(self, ranks: ThreadedRanks, at: tuple[int, ...], seed: int = 0, step: int = 0):
            self.ranks, self.at, self.seed, self.step = ranks, at, seed, step
            self.device = torch.get_default_device()
            self.backward = False

        def coordinate(self, axes: tuple[int, ...]) -> int:
            """This rank's index within the flattened group of ``axes``, the first axis outermost."""
            index = 0
            for axis in axes:
                index = index * self.ranks.mesh[axis] + self.at[axis]
            return index

        def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
            """``value`` reduced over the group of ``axes``; every rank of the mesh has to call it."""
            ranks = self.ranks
            bytes_ = 0 if value.is_floating_point() else value.numel() * value.element_size()
            ranks.sent[self.at].append(Sent(axes, value.numel(), bytes_, self.backward))
            ranks._board[self.at] = value.detach()
            ranks._barrier.wait()
            # All values are posted now. The second wait keeps a fast rank from posting its next value before
            # the slow ones have read this one.
            group = [
                p for p in ranks.places if all(p[a] == self.at[a] for a in range(len(p)) if a not in axes)
            ]
            values = torch.stack([ranks._board[p] for p in group])
            result = values.amax(0) if op == "max" else values.sum(0)
            ranks._barrier.wait()
            return result

        def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
            """``value`` summed over ``axes``."""
            return self.all_reduce(value, axes)
