"""Gradients that are on their way to their shards while a place computes something else."""

from __future__ import annotations

from contextlib import nullcontext

from tensoropt.engine.ahead import CallAhead
from tensoropt.engine.gradients import Gradients


class Trailing:
    """Gradients of a place's last backward on their way to their shards, beside whatever the place computes
    next.

    Those of one backward are waited for as the next one of the place ends, whichever stage's it is, so that
    there is memory for no more than one backward's.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[CallAhead, Gradients, bool]] = []

    def add(self, call: CallAhead, gradients: Gradients, *, last: bool) -> None:
        """Gradients of a backward that is over.

        Args:
            gradients: what they are added to.
            last: no other micro-batch adds to them.
        """
        self._calls.append((call, gradients, last))

    def take_in(self) -> None:
        """Wait for what is under way, and take it in."""
        while self._calls:
            call, gradients, last = self._calls.pop(0)
            with nullcontext() if last else gradients.of_earlier():
                call.finish()
