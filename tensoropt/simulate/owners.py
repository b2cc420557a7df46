"""The owners of a memory curve's bytes: the tensors alive at every change, and until when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tensoropt.costs.prices import free_prices
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.recording import MEMORY_KINDS, OwnerRow
from tensoropt.simulate.step import lower, operator_of
from tensoropt.simulate.timed import TimedStep


@dataclass(frozen=True)
class _MemoryPoint:
    moment: str
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    transient: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one step on the rank with the largest shards."""

    points: tuple[_MemoryPoint, ...]

    @property
    def peak(self) -> _MemoryPoint:
        """The first point with the most bytes."""
        return max(self.points, key=lambda p: p.total)


def memory_curve(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> MemoryCurve:
    """Return the memory curve of one strategy, one point per moment, from the facts by group."""
    candidates = StrategyCandidates(strategy, facts)
    batch = Batch(candidates, *candidates.row(), free_prices(strategy.graph, strategy.mesh, optimizer))
    step, curve = lower(batch), list[_MemoryPoint]()
    lasting = [owner.effects.at(0) for owner in batch.owners]
    parameters, gradients, state = (
        sum(getattr(effects, kind) for effects in lasting) for kind in MEMORY_KINDS[:3]
    )
    for now, at in zip(step.instructions, step.memory, strict=True):
        # Moments at which nothing is needed or computed only repeat the last point.
        if not at.workspace and now.moment.kind not in ("compute", "step"):
            continue
        words, transient = now.moment.words, int(at.transient + at.workspace)
        point = _MemoryPoint(words, parameters, gradients, state, int(at.kept), transient)
        if curve and curve[-1].moment == words:  # parts of one group
            point = max(curve.pop(), point, key=lambda p: p.total)
        curve.append(point)
    return MemoryCurve(tuple(curve))


class StepOwners:
    """The owners at every point of a timed strategy's memory curve. ``batch``: a batch of one strategy."""

    def __init__(self, batch: Batch, timed: TimedStep):
        assert batch.count == 1, "one strategy is timed"
        self.timed = timed
        self._lasting = [row for owner in batch.owners for row in _lasting(batch, owner)]
        self._lifetimes = tuple(lower(batch).lifetimes())

    def at(self, point: int) -> tuple[OwnerRow, ...]:
        """Return the owners at one point of the curve, the largest first; 0 is before the step."""
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
        """Return the start of another position in the micro-batch of ``moment``."""
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
