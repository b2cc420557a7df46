"""The owners of memory in a step: the tensors in memory at each point of its memory curve, and until when."""

from __future__ import annotations

from collections.abc import Iterator

from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.recording import OwnerRow
from tensoropt.simulate.step import lifetimes, operator_of
from tensoropt.simulate.timed import TimedStep


class StepOwners:
    """Finds the tensors in memory at points of a strategy's memory curve; ``batch`` has no other strategy."""

    def __init__(self, batch: Batch, timed: TimedStep):
        assert batch.count == 1, "one strategy is timed"
        self.timed = timed
        self._lasting = [row for owner in batch.owners for row in _lasting(batch, owner)]
        self._lifetimes = tuple(lifetimes(batch))

    def at(self, point: int) -> tuple[OwnerRow, ...]:
        """Return the tensors in memory at one point of the curve, largest first; point 0: before the step."""
        if not 0 <= point <= len(self.timed.curve):
            raise IndexError(f"there is no point {point} in a curve of {len(self.timed.curve) + 1}")
        alive = self._alive(self.timed.states[point - 1]) if point else ()
        return tuple(sorted((*self._lasting, *alive), key=lambda row: -row.bytes))

    def _alive(self, moment: int) -> Iterator[OwnerRow]:
        position = self._position(moment)
        for named, first, end, since, until in self._lifetimes:
            if not first <= position < end:
                continue
            yield OwnerRow(
                named.operator,
                named.tensor,
                named.what,
                # A moment's workspace is part of the curve's transient bytes.
                "transient" if named.kind == "workspace" else named.kind,
                named.bytes,
                self._time_s(moment, position, first),
                self._time_s(moment, position, end),
                since,
                until,
            )

    def _position(self, moment: int) -> int:
        last, in_all = self.timed.last, self.timed.last * self.timed.micro_batches
        return moment % last if moment < in_all else moment - in_all + last

    def _time_s(self, moment: int, position: int, other: int) -> float:
        """Return when position ``other`` begins in the micro-batch that has ``moment`` at ``position``."""
        last, times = self.timed.last, self.timed.moment_times
        in_all = last * self.timed.micro_batches
        if moment < in_all:
            begins = moment - position
            # What the end of one micro-batch gives back is gone when the next one begins.
            number = min(begins + other, begins + last) if begins + last < in_all else begins + other
        else:
            number = in_all + other - last
        return times[number] if number < len(times) else self.timed.end_s


def _lasting(batch: Batch, owner: Owner) -> Iterator[OwnerRow]:
    effects = owner.effects.at(0)
    words = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer state"}
    for kind, what in words.items():
        if size := getattr(effects, kind):
            what = what if owner.kind == "parameter" else f"{what} (unsharded copy)"
            yield OwnerRow(operator_of(batch, owner), owner.name, what, kind, int(size), 0.0, None, "", "")
