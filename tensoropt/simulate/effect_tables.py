"""Effects as arrays: for owners that look alike, the effects of each choice at each moment.

The simulator looks up the figures of many strategies in such a table at once, by the numbers of their
choices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tensoropt.costs.effects import Effects, GradientShare, When
from tensoropt.types import SOURCES, Floats, Indices

Axes = tuple[int, ...]


class MomentPlace(NamedTuple):
    """A moment of an owner, or the point right after it."""

    when: When
    after: bool


class Cells:
    """One figure per effect number; 0 for numbers without a figure."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._values: list[float] = []
        self._table: Floats = np.zeros(0)

    def add(self, number: int, value: float) -> None:
        """Add to the figure of ``number``, which is the last number that was begun or a later one."""
        if self._numbers and self._numbers[-1] == number:
            self._values[-1] += value
        else:
            self._numbers.append(number)
            self._values.append(value)

    def most(self, number: int, value: float) -> None:
        """Raise the figure of ``number`` to ``value``, with the same condition on ``number``."""
        if self._numbers and self._numbers[-1] == number:
            self._values[-1] = max(self._values[-1], value)
        else:
            self.add(number, value)

    def of(self, numbers: Indices, count: int) -> Floats:
        """(k,) the figures of some numbers; ``count`` numbers have been assigned so far."""
        # Figures are only added for a new number, so a table with that many numbers is up to date.
        if len(self._table) != count:
            self._table = np.zeros(count)
            self._table[self._numbers] = self._values
        return self._table[numbers]


class EffectTables:
    """The effects of one kind of owners by number, in the order in which they occur.

    Attributes:
        kept, transient, workspace: bytes by place.
        local, host: seconds on the device, and of issuing work to it, by place.
        sends: by place and axes: (seconds of all collectives, bytes of the largest, seconds of work that
            begins together with them).
        beside: by place, kind, axes and dtype: the bytes that are sent together with those of others, the
            number of parameters, and the bytes that stay where they are.
        kinds: by axes and kind of collective: 1 if it is sent.
        lasting: for each number, the bytes that are alive during the whole step: (parameters, gradients,
            optimizer).
        seconds: for each number, the seconds of a step by source, as in ``SOURCES``.
        shares: for each number, the gradient that is reduced with others, or None.
    """

    def __init__(self, micro: int):
        self.micro, self.count = micro, 0
        self.kept: dict[MomentPlace, Cells] = {}
        self.transient: dict[MomentPlace, Cells] = {}
        self.workspace: dict[MomentPlace, Cells] = {}
        self.local: dict[MomentPlace, Cells] = {}
        self.host: dict[MomentPlace, Cells] = {}
        self.sends: dict[tuple[MomentPlace, Axes], tuple[Cells, Cells, Cells]] = {}
        self.beside: dict[tuple[MomentPlace, str, Axes, str], tuple[Cells, Cells, Cells]] = {}
        self.kinds: dict[tuple[Axes, str], Cells] = {}
        self.lasting: list[tuple[int, int, int]] = []
        self.seconds: list[list[float]] = []
        self.shares: list[GradientShare | None] = []

    def add(self, choice: Effects) -> None:
        """Add the effects of the next number."""
        number, seconds, shared = self.count, [0.0] * len(SOURCES), None
        self.count += 1
        for e in choice.effects:
            place = MomentPlace(e.when, e.after)
            for cells, value in (
                (self.kept, e.kept),
                (self.transient, e.transient),
                (self.workspace, e.workspace_bytes),
            ):
                if value:
                    cells.setdefault(place, Cells()).add(number, value)
            times = 1 if e.when.once else self.micro
            if host_s := e.host_s + e.passing.host_s:
                self.host.setdefault(place, Cells()).add(number, host_s)
            if local_s := e.local_s + e.passing.device_s:
                self.local.setdefault(place, Cells()).add(number, local_s)
                seconds[SOURCES.index(e.source)] += local_s * times
            for send in e.sends:
                sends = self.sends.setdefault((place, send.axes), (Cells(), Cells(), Cells()))
                sends[0].add(number, send.seconds)
                # The slow-down that a collective causes in the following work grows with its bytes and does
                # not add up over several in a row.
                sends[1].most(number, send.bytes)
                if e.beside_work_s:
                    sends[2].most(number, e.beside_work_s)
                self.kinds.setdefault((send.axes, send.kind), Cells()).most(number, 1.0)
                seconds[SOURCES.index(send.source)] += send.seconds * times
            for send, dtype, stays in e.beside:
                key = place, send.kind, send.axes, dtype
                size, members, staying = self.beside.setdefault(key, (Cells(), Cells(), Cells()))
                size.add(number, send.bytes)
                members.add(number, 1.0)
                staying.add(number, send.bytes * stays)
                self.kinds.setdefault((send.axes, send.kind), Cells()).most(number, 1.0)
            if shared is None:
                shared = e.share
        self.lasting.append((choice.parameters, choice.gradients, choice.optimizer))
        self.seconds.append(seconds)
        self.shares.append(shared)
