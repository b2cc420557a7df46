"""The owners of a plan's memory at a moment of its step: operators and tensors, the most bytes first.

This shows for the simulated step what PyTorch's memory_viz shows for a run: every row says what becomes alive
when, and until when. At every moment the rows add up to the height of the memory curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.report.detail import curve_of_step, recorded_step
from tensoropt.simulate.owners import StepOwners
from tensoropt.simulate.recording import MemoryAt, OwnerRow, Recording
from tensoropt.units import format_bytes, format_seconds

BY_STAGE = "a pipeline's owners are given by stage and micro-batch; tensors in a stage are not distinguished"


@dataclass(frozen=True)
class MomentOwners:
    """The owners at one moment.

    Attributes:
        number: the number of the point on the memory curve.
        at: the point itself.
        rows: the owners, the most bytes first; their sum is ``at.total``.
    """

    number: int
    at: MemoryAt
    rows: tuple[OwnerRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return {"number": self.number, "total_bytes": self.at.total, **asdict(self)}

    def lines(self, top: int) -> list[str]:
        """Return a table for a terminal of the largest ``top`` rows, with the rest in one row."""
        shown, rest = self.rows[:top], self.rows[top:]
        title = f"memory at {format_seconds(self.at.time_s)}: {format_bytes(self.at.total)}"
        cells = [(format_bytes(row.bytes), row.kind, *_names(row), until_words(row)) for row in shown]
        if rest:
            cells.append((format_bytes(sum(row.bytes for row in rest)), "", f"{len(rest)} more", "", "", ""))
        head = ("bytes", "kind", "operator", "tensor", "what", "until")
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        return [title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *cells))]


def _names(row: OwnerRow) -> tuple[str, str, str]:
    return row.operator, row.tensor, row.what


def until_words(row: OwnerRow) -> str:
    """Say until when something is alive."""
    if row.until_s is None:
        return "stays"
    return f"{format_seconds(row.until_s)}, {row.until}"


@dataclass(frozen=True)
class PointOwners:
    """The owners of one point's memory, for any moment of its step.

    Attributes:
        curve: the memory curve.
        note: what is not known for this kind of plan; "" if everything is.
    """

    curve: tuple[MemoryAt, ...]
    rows_at: Callable[[int], Sequence[OwnerRow]]
    note: str = ""

    @cached_property
    def peak(self) -> int:
        """The number of the curve's highest point, the first of several."""
        return max(range(len(self.curve)), key=lambda number: self.curve[number].total)

    def number_at(self, time_s: float) -> int:
        """Return the point of the curve that holds at a time: the last one by then; of several at once, the
        highest.

        Raises:
            TensorOptError: the step has no such time.
        """
        end_s = self.curve[-1].time_s
        if not 0 <= time_s <= end_s:
            raise TensorOptError(
                f"the step has no moment at {time_s:g} s; its memory curve reaches from 0 to "
                f"{format_seconds(end_s)}"
            )
        before = [number for number, at in enumerate(self.curve) if at.time_s <= time_s]
        last_s = self.curve[before[-1]].time_s
        latest = [number for number in before if self.curve[number].time_s == last_s]
        return max(latest, key=lambda number: self.curve[number].total) if len(latest) > 1 else before[-1]

    def at(self, number: int | None = None) -> MomentOwners:
        """Return the owners at a point of the curve; at its peak by default.

        Raises:
            TensorOptError: there is no such point.
        """
        number = self.peak if number is None else number
        if not 0 <= number < len(self.curve):
            raise TensorOptError(
                f"there is no moment {number}; the memory curve has moments 0 to {len(self.curve) - 1}"
            )
        rows = sorted(self.rows_at(number), key=lambda row: -row.bytes)
        return MomentOwners(number, self.curve[number], tuple(rows))


def point_owners(exploration: Exploration, index: int) -> PointOwners:
    """Return the owners of the memory of point ``index`` of ``exploration.all_points``, also for one loaded
    from disk.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without what this needs.
    """
    points = exploration.all_points
    if not 0 <= index < len(points):
        raise TensorOptError(f"there is no point {index + 1}; there are points 1 to {len(points)}")
    if (record := points[index].record) is not None:
        return _recorded(record.recording, points[index].pipeline is not None, index)
    evaluated, timed = recorded_step(exploration, index)
    return PointOwners(curve_of_step(evaluated, timed), StepOwners(evaluated.batch, timed).at)


def _recorded(recording: Recording, pipelined: bool, index: int) -> PointOwners:
    """Return the owners of a placed or pipelined point, which has them in its record."""
    if recording.owners is None:
        raise TensorOptError(
            f"point {index + 1} was saved without the owners of its memory (by an older version); "
            "explore again"
        )
    curve, owned = recording.memory_curve(), recording.owners

    def time_s(number: int) -> float:
        return curve[min(number, len(curve) - 1)].time_s

    def rows_at(number: int) -> list[OwnerRow]:
        rows = []
        for operator, tensor, what, kind, size, first, end, since, until in owned:
            if first <= number < end:
                times = time_s(first), time_s(end) if until else None
                rows.append(OwnerRow(operator, tensor, what, kind, size, *times, since, until))
        return rows

    return PointOwners(curve, rows_at, BY_STAGE if pipelined else "")
