"""The tensors that make up a plan's memory at a moment of its step, largest first, with their operators.

They show for the simulated step what PyTorch's memory_viz shows for a run: every row is a tensor with the
times from and until which it is alive. At every moment the rows add up to the height of the memory curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tensoropt.console import columns
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.report.detail import step_of
from tensoropt.simulate.recording import MemoryAt, OwnerRow
from tensoropt.units import format_bytes, format_seconds


@dataclass(frozen=True)
class _MomentOwners:
    """The tensors in memory at one moment of a step.

    Attributes:
        number: the index of the moment on the memory curve.
        at: the memory at that moment, by kind.
        rows: the tensors, largest first; their sizes add up to ``at.total``.
    """

    number: int
    at: MemoryAt
    rows: tuple[OwnerRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"number": self.number, "total_bytes": self.at.total, **asdict(self)}

    def lines(self, top: int) -> list[str]:
        """Return a table of the largest ``top`` tensors as lines of text; the last row sums up all others."""
        shown, rest = self.rows[:top], self.rows[top:]
        title = f"memory at {format_seconds(self.at.time_s)}: {format_bytes(self.at.total)}"
        cells = [["bytes", "kind", "operator", "tensor", "what", "until"]]
        for row in shown:
            figures = [format_bytes(row.bytes), row.kind, row.operator, row.tensor, row.what]
            cells.append([*figures, _until_words(row)])
        if rest:
            cells.append([format_bytes(sum(row.bytes for row in rest)), "", f"{len(rest)} more", "", "", ""])
        return [title, *columns(cells, left=tuple(range(6))).split("\n")]


def _until_words(row: OwnerRow) -> str:
    if row.until_s is None:
        return "stays"
    return f"{format_seconds(row.until_s)}, {row.until}"


@dataclass(frozen=True)
class PointOwners:
    """The tensors in memory at any moment of one point's step.

    Attributes:
        curve: the memory over the step's time.
        rows_at: returns the tensors in memory at a moment, given as an index into ``curve``.
        note: the part of the memory whose tensors are unknown for this kind of plan; "" if all are known.
    """

    curve: Sequence[MemoryAt]
    rows_at: Callable[[int], Sequence[OwnerRow]]
    note: str = ""

    @cached_property
    def peak(self) -> int:
        """The index in ``curve`` of the largest memory, the first of several."""
        return max(range(len(self.curve)), key=lambda number: self.curve[number].total)

    def at(self, number: int | None = None) -> _MomentOwners:
        """Return the tensors in memory at moment ``number`` of the curve; by default at the peak.

        Raises:
            TensorOptError: there is no such moment.
        """
        number = self.peak if number is None else number
        if not 0 <= number < len(self.curve):
            raise TensorOptError(
                f"there is no moment {number}; the memory curve has moments 0 to {len(self.curve) - 1}"
            )
        rows = sorted(self.rows_at(number), key=lambda row: -row.bytes)
        return _MomentOwners(number, self.curve[number], tuple(rows))


def point_owners(exploration: Exploration, index: int) -> PointOwners:
    """Return the tensors in memory at any moment of the step of point ``index`` of
    ``exploration.all_points``.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
    """
    return PointOwners(*step_of(exploration, index).owners(), exploration.all_points[index].kind.owners)
