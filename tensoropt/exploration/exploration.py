"""The exploration, which holds the frontier of a model on a cluster; each of its points can become a plan."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np

from tensoropt.console import columns
from tensoropt.errors import InfeasibleError, TensorOptError, import_extra
from tensoropt.exploration.answer import answer
from tensoropt.exploration.exploration_files import read_files, write_files
from tensoropt.exploration.frontier_table import left_of, table_rows
from tensoropt.exploration.notable import notable
from tensoropt.exploration.rates import device_words, made_for
from tensoropt.exploration.recommended import recommended
from tensoropt.plan.facts_table import table_html
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan import Plan
from tensoropt.plan.point import Point
from tensoropt.plan.point_plan import plan_of
from tensoropt.units import counted, format_bytes, format_seconds, limit_bytes, limit_seconds

_WIDTH = 110
"""Maximum line width of a ``repr``."""
_MOST_ROWS = 8
"""Maximum number of points in a notebook's table."""
_LEFT_OUT = ("compute/", "parameters/", "figures", "gap")
"""Prefixes of columns left out of a printed frontier, to fit a terminal's width."""


def _headline(findings: Findings) -> str:
    cluster = made_for(findings.cluster)
    devices = f" ({device_words(cluster)})" if cluster is not None else ""
    step = "training step" if findings.settings.get("mode", "train") == "train" else "inference step"
    on = f"{findings.model.source or 'a model'} on {findings.cluster.get('name', 'a cluster')}"
    return f"Exploration of a {step} of {on}{devices}"


def _rows(findings: Findings) -> list[list[str]]:
    rows = table_rows(findings, list(notable(findings, _MOST_ROWS)))
    kept = [i for i, name in enumerate(rows[0][:-1]) if not name.startswith(_LEFT_OUT)]
    return [
        [row[0], row[-1].removeprefix("<- ").partition(", ")[0], *(row[i] for i in kept[1:])] for row in rows
    ]


def _answered(findings: Findings) -> str:
    return answer(findings).sentence() if findings.points and findings.cluster.get("kinds") else ""


def _table(findings: Findings) -> tuple[list[list[str]], str]:
    if not findings.points:
        return [["no points"]], ""
    rows, count = _rows(findings), counted(len(findings.points), "point")
    shown = len(rows) - 1
    return rows, count if shown == len(findings.points) else f"{shown} of {count} shown"


@dataclass(frozen=True, repr=False)
class Exploration(Findings):
    """The result of :func:`tensoropt.explore`: a frontier, with methods that choose plans and save files."""

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The frontier's points, ascending in memory, strictly descending in time.

        Python indices count from 0: ``frontier[0]`` is point 1 of the table, the command line, the CSV and
        every argument ``point=``.
        """
        return tuple(self.points)

    @property
    def leanest(self) -> Point:
        """The point that needs the least memory."""
        return self.points[0]

    @property
    def fastest(self) -> Point:
        """The point with the shortest step."""
        return self.points[-1]

    def plot(self) -> Any:
        """Return the frontier as a Plotly figure, in which the recommended plan is selected.

        Raises:
            MissingExtraError: the dashboard's packages (the extra ``app``) are not installed.
        """
        # The dashboard is a layer above this package, so it is imported by name.
        made = import_extra("tensoropt_app.standalone", "app", "plot()").figure(self)
        return import_extra("plotly.graph_objects", "app", "plot()").Figure(made)

    def __repr__(self) -> str:
        rows, count = _table(self)
        said = wrap(_answered(self), _WIDTH)
        table = columns(rows, left=left_of(rows[0]))
        return "\n".join([_headline(self), *said, table, *filter(None, [count])])

    def _repr_html_(self) -> str:
        picture = ""
        if said := _answered(self):
            # The dashboard is a layer above this package, so it is imported by name; a checkout that is not
            # installed lacks it.
            with contextlib.suppress(ModuleNotFoundError):
                picture = importlib.import_module("tensoropt_app.standalone").notebook_plot(self, "")
        rows, count = _table(self)
        above = f"<p><b>{escape(_headline(self))}</b></p><p>{escape(said)}</p>"
        return f"<div>{above}{picture}{table_html(rows, left_of(rows[0]))}<p>{count}</p></div>"

    def check_budget(self) -> None:
        """Raise :class:`NothingFitsError` if no point fits the exploration's budget."""
        if self.settings["memory_bytes"] is not None and not (self.needs <= self.limit_bytes).any():
            raise NothingFitsError(self._nothing_fits(self.limit_bytes), self)

    def _nothing_fits(self, limit_bytes: float) -> str:
        least = int(np.argmin(self.needs))
        fit = self.fit(least)
        beside = sum(fit.process.values())
        told = f", of which {format_bytes(beside)} is an estimate of process memory beside tensors"
        return (
            f"no plan fits {format_bytes(limit_bytes)}; the smallest plan needs "
            f"{format_bytes(fit.needed_bytes)}{told if beside else ''}"
        )

    def noted(self, notes: Iterable[str], **facts: Any) -> Exploration:
        """Return a copy with further notes and further entries (``facts``) in its report."""
        return replace(self, report={**self.report, **facts, "notes": [*self.report["notes"], *notes]})

    def index(
        self,
        *,
        memory_bytes: float | None = None,
        headroom: float | str | None = None,
        time_s: float | None = None,
        knee_point: bool = False,
        point: int | None = None,
        fastest: bool = False,
    ) -> int:
        """Return the index in :attr:`all_points` of the point that the arguments ask for.

        By default this is the recommended point. Any point but one given by number fits the memory budget.

        Args:
            memory_bytes, headroom: the memory budget per device in bytes, and the memory to keep free on a
                device; by default the exploration's budget, or a device's memory less the usual headroom.
            time_s: the longest step in seconds; given alone, the leanest point within this time is returned.
            knee_point: whether to return the frontier's knee.
            point: the point's number, from 1, instead of limits.
            fastest: whether to return the fastest point, instead of the simplest that is at most 3 % slower
                (:func:`~tensoropt.exploration.recommended.recommended`).

        Raises:
            TensorOptError: no point has this number, or arguments exclude each other.
            InfeasibleError: nothing fits; the message states the least memory or time that would do.
        """
        if point is not None:
            if knee_point or fastest or not (memory_bytes is headroom is time_s is None):
                raise TensorOptError(
                    f"point {point} is given with a limit, knee or fastest; give only the point"
                )
            return self._index_of(point)
        if knee_point and (fastest or time_s is not None):
            raise TensorOptError("knee is given together with fastest or a time; give only one of them")
        bare = memory_bytes is None and headroom is None
        limit = self.limit_bytes if bare else self.usable_bytes(memory_bytes, headroom)
        rows = np.flatnonzero(self.needs <= limit)
        if not len(rows):
            raise InfeasibleError(self._nothing_fits(limit))
        if knee_point and len(self.points):
            return self.knee_within(limit)
        if time_s is not None:
            times = self.all_points.time
            quick = rows[times[rows] <= time_s]
            if not len(quick):
                raise InfeasibleError(
                    f"no plan that fits {format_bytes(limit)} takes at most {format_seconds(time_s)}; the "
                    f"fastest takes {format_seconds(float(times[rows].min()))}"
                )
            rows = quick
            if bare and not fastest:
                return int(rows[np.argmin(self.needs[rows])])
        found = recommended(self, limit, rows)
        assert found is not None
        return found.fastest if fastest else found.row

    def _index_of(self, number: int) -> int:
        count, whole = len(self.points), len(self.all_points)
        if not hasattr(number, "__index__"):
            raise TensorOptError(f"point must be a whole number; got {number!r}")
        if not 1 <= number <= whole:
            others = f", plans of other planners are {count + 1} to {whole}" if whole > count else ""
            raise TensorOptError(f"there is no point {number}; the frontier has points 1 to {count}{others}")
        return number - 1

    def choose(
        self,
        *,
        memory: float | str | None = None,
        time: float | str | None = None,
        knee: bool = False,
        point: int | None = None,
        fastest: bool = False,
        memory_bytes: float | None = None,
        time_s: float | None = None,
    ) -> Plan:
        """Return the recommended plan, or the one that arguments as in :func:`tensoropt.choose` select."""
        index = self.index(
            memory_bytes=limit_bytes(memory_bytes, memory),
            time_s=limit_seconds(time_s, time),
            knee_point=knee,
            point=point,
            fastest=fastest,
        )
        return self.plan(index)

    def plan(self, which: int | Point) -> Plan:
        """Return the plan of a point.

        Args:
            which: a point, such as :attr:`fastest`, or its index in :attr:`all_points`, from 0
                (``choose(point=1)`` counts from 1).
        """
        return plan_of(self, which if isinstance(which, Point) else self.all_points[which])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the exploration's files to a folder, all or none.

        Raises:
            TensorOptError: the folder cannot be written; its old content is kept.
        """
        if not isinstance(directory, (str, os.PathLike)):
            raise TensorOptError(f"save() takes a folder's path; got {directory!r}")
        write_files(self, directory)


class NothingFitsError(InfeasibleError):
    """The error if no point fits the memory budget of an exploration.

    Attributes:
        exploration: all points found; the leanest shows which budget would do.
    """

    def __init__(self, message: str, exploration: Exploration):
        super().__init__(message)
        self.exploration = exploration

    def __reduce__(self) -> tuple[object, ...]:
        return (InfeasibleError, self.args)  # other processes need only the message


class InterruptedExplorationError(KeyboardInterrupt):
    """The error if Ctrl-C ended the exploration after points were found.

    Attributes:
        exploration: the points found until then.
    """

    def __init__(self, left: Sequence[str], exploration: Exploration):
        super().__init__(f"interrupted; not searched: {', '.join(left)}")
        self.exploration = exploration


def load_exploration(directory: str | os.PathLike[str]) -> Exploration:
    """Return the exploration that :meth:`Exploration.save` wrote into a folder.

    Raises:
        TensorOptError: the folder holds no exploration, one of another version, or files of different runs.
    """
    return Exploration(**read_files(directory))
