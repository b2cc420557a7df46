"""The moments at which new values of buffers replace the old ones.

A buffer's new value exists from the moment when it is made. Buffers are not counted, so from the moment when
the old value is released, the new one is not counted either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensoropt.costs.effects import BACKWARD_END, FORWARD_END, When, storage_end
from tensoropt.costs.move_effects import MoveEffects
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.sharding.groups import Group
from tensoropt.simulate.candidates import Candidates
from tensoropt.simulate.readings import Column, Readings
from tensoropt.simulate.step_schedule import StepSchedule
from tensoropt.types import Flags, Indices


@dataclass(frozen=True)
class Taken:
    """The moment at which a tensor replaces a buffer.

    Attributes:
        ends: the positions of the backwards that may need the old value.
        which: for each strategy, the number of the last of these that does; -1 if none does.
        always: the moment, if it is the same in all strategies; None if it depends on ``which``.
        never: the tensor is not a buffer's new value, or its memory is counted elsewhere.
    """

    ends: tuple[int, ...]
    which: Indices
    always: When | None = None
    never: bool = False

    def until(self, row: int, first: int) -> When | None:
        """The moment in one strategy; None if it never happens.

        Args:
            first: the number of the first of ``ends`` among the tensor's.
        """
        if self.never or self.always is not None:
            return self.always
        number = int(self.which[row])
        return FORWARD_END if number < 0 else storage_end(first + number)


class NewBuffers:
    """The new values of buffers, and the groups that still need the old ones."""

    def __init__(
        self, candidates: Candidates, schedule: StepSchedule, moves: MoveEffects, readings: Readings
    ):
        self.graph, self.schedule, self.moves, self.readings = candidates.graph, schedule, moves, readings
        self.micro_batches = candidates.mesh[0]
        self._buffers = {new: name for name, new in self.graph.atoms.graph.mutations.items()}

    @cached_property
    def _in_stage(self) -> bool:
        """Whether this is a stage of a pipeline, whose place holds new values until the step is over
        (:mod:`tensoropt.pipeline.memory`)."""
        return any(group.anchor.target in (ARRIVE, DEPART) for group in self.graph.groups)

    def taken(self, name: str) -> Taken:
        """The moment at which a tensor replaces a buffer."""
        none = np.full(self.readings.count, -1, dtype=np.int64)
        if name not in self._buffers or self._in_stage or not self.graph.atoms.graph.training:
            return Taken((), none, never=True)
        if self.micro_batches > 1:  # all of them read the old value
            return Taken((), none, BACKWARD_END)
        keeping = list(self._keeping(self._buffers[name]))
        ends = tuple(self.schedule.position("backward", "compute", group.name) for group, _ in keeping)
        for number in sorted(range(len(ends)), key=ends.__getitem__):
            none[keeping[number][1]] = number
        return Taken(ends, none)

    def _keeping(self, buffer: str) -> Iterator[tuple[Group, Flags]]:
        """Yield the groups whose backward may need a buffer, each with the strategies in which it does: those
        that read it, and those that read a view of it in place."""
        for group in self.graph.groups:
            if buffer not in group.free:
                continue
            yield group, self.readings.keeps(group.name, buffer)
            for name in group.writes:
                view = self.readings.keeps(group.name, buffer, name)
                for reader in self.schedule.readers.get(name, ()) if view.any() else ():
                    reads = self.readings.read(reader.name, name)
                    kept = np.array([one.kept or one.again for one in reads.values], dtype=bool)[reads.which]
                    yield reader, view & kept & ~self._moved(group.name, name, reads)

    def _moved(self, maker: str, name: str, reads: Column) -> Flags:
        """Whether a reader of a tensor has its own copy, per strategy."""
        hub, written = self.readings.hub(name), self.readings.written(maker, name)
        rows = range(self.readings.count)
        sources = [hub.at(row) if hub else written.at(row).layout for row in rows]
        found = [bool(self.moves.steps(name, sources[row], reads.at(row).layout)[0]) for row in rows]
        return np.array(found, dtype=bool)
