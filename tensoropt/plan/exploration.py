"""An exploration: the frontier of a model on a cluster, every point of which can become a plan."""

from __future__ import annotations

import os
from dataclasses import dataclass

import tensoropt.plan.facts  # noqa: F401  by which points, plans and spaces are shown
from tensoropt.errors import InfeasibleError
from tensoropt.plan.exploration_files import read_files, write_files
from tensoropt.plan.findings import Findings
from tensoropt.plan.overview import PointSequence, overview, overview_html
from tensoropt.plan.plan import Plan
from tensoropt.plan.point import Point
from tensoropt.plan.point_plan import plan_of
from tensoropt.units import format_bytes, format_seconds


@dataclass(frozen=True, repr=False)
class Exploration(Findings):
    """The result of :func:`tensoropt.explore`; its fields are those of :class:`Findings`."""

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The points, ascending in memory, strictly descending in time; shown as a table."""
        return PointSequence.of(self)

    def __repr__(self) -> str:
        return overview(self)

    def _repr_html_(self) -> str:
        return overview_html(self)

    def fastest_within(self, memory_bytes: float) -> int | None:
        """The fastest point of the frontier within a budget; None where none fits."""
        # Points ascend in memory and descend in time.
        return max((i for i, p in enumerate(self.points) if p.memory_bytes <= memory_bytes), default=None)

    def index(
        self, *, memory_bytes: float | None = None, time_s: float | None = None, knee_point: bool = False
    ) -> int:
        """The point that fits: fastest within a memory budget, leanest within a time, or the knee.

        Raises:
            InfeasibleError: nothing fits; says what would.
        """
        if knee_point:
            return self.knee
        if memory_bytes is not None:
            fastest = self.fastest_within(memory_bytes)
            if fastest is None or (time_s is not None and self.points[fastest].time_s > time_s):
                smallest = self.points[0].memory_bytes
                raise InfeasibleError(
                    f"no plan fits {format_bytes(memory_bytes)}"
                    + (f" and {format_seconds(time_s)}" if time_s is not None else "")
                    + f"; the smallest plan needs {format_bytes(smallest)}"
                )
            return fastest
        if time_s is not None:
            for i, p in enumerate(self.points):
                if p.time_s <= time_s:
                    return i
            raise InfeasibleError(
                f"no plan takes at most {format_seconds(time_s)}; the fastest takes "
                f"{format_seconds(self.points[-1].time_s)}"
            )
        return len(self.points) - 1

    def choose(
        self, *, memory_bytes: float | None = None, time_s: float | None = None, knee: bool = False
    ) -> Plan:
        """A plan: the fastest one, or what the arguments ask for (see :meth:`index`)."""
        return self.plan(self.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee))

    def plan(self, index: int) -> Plan:
        """Point ``index`` of :attr:`all_points` as a plan."""
        return plan_of(self, self.all_points[index])

    def plan_of(self, point: Point) -> Plan:
        """A point of one of the spaces as a plan."""
        return plan_of(self, point)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``exploration.json``, ``points.npz``, ``strategies.json.gz``, ``frontier.csv``
        and ``recorded.json.gz``, or none.

        Raises:
            TensorOptError: the folder cannot be written; what was there is kept.
        """
        write_files(self, directory)


def load_exploration(directory: str | os.PathLike[str]) -> Exploration:
    """The exploration that :meth:`Exploration.save` wrote into a folder.

    Raises:
        TensorOptError: the folder holds none, it is of another version, or its files do not fit together.
    """
    return Exploration(**read_files(directory))
