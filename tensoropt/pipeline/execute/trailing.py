"""Gradients on their way to their shards while a place computes something else."""

from __future__ import annotations

from contextlib import nullcontext

from tensoropt.engine.ahead import CallAhead
from tensoropt.engine.gradients import Gradients


class Trailing:
    """The gradients of a place's last backward on their way to their shards, while the place computes what
    comes next.

    The place waits for the gradients of one backward as its next backward ends, whichever stage's that is, so
    that no more than one backward's gradients take memory.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[CallAhead, Gradients, bool]] = []

    def add(self, call: CallAhead, gradients: Gradients, *, last: bool) -> None:
        """Add the gradients of a backward that is over.

        Args:
            gradients: the gradients to add them to.
            last: whether no other micro-batch will add to them.
        """
        self._calls.append((call, gradients, last))

    def take_in(self) -> None:
        """Wait for the gradients under way, and take them in."""
        while self._calls:
            call, gradients, last = self._calls.pop(0)
            with nullcontext() if last else gradients.of_earlier():
                call.finish()
