"""The fields of an exploration; :class:`~tensoropt.exploration.exploration.Exploration` adds the verbs.

The files (:mod:`tensoropt.exploration.exploration_files`), CSVs, tables and pictures are made from
these fields alone, so that none of them needs the class that calls it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tensoropt.frontier import knee
from tensoropt.ops.registry import is_dense_transformer
from tensoropt.plan.keys import point_keys
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.plan_names import YOUR_JOB, plan_names, planner_title
from tensoropt.plan.point import Point
from tensoropt.plan.point_table import PointTable
from tensoropt.plan.space import Space


@dataclass(frozen=True)
class Findings:
    """The points, the spaces they come from, and the facts about the run that found them.

    Attributes:
        points: ascending in memory, strictly descending in time.
        spaces: the spaces that were searched.
        model, cluster, settings, versions: as in a plan.
        report: facts about the run: operators, groups, coverage, seconds per stage, notes.
        others: the points that other planners found in the same spaces, each with its planner's name.
        comparison: what every planner did, in the form of :mod:`tensoropt.planners.compare`.
        captured: the capture, while in the process that explored; not saved.
        recorded: the operator graph and the costs used (:class:`~tensoropt.plan.recorded.Recorded`); None
            if an operator has an argument that no file can hold.
    """

    points: Sequence[Point]
    spaces: tuple[Space, ...]
    model: ModelInfo
    cluster: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    report: Mapping[str, Any]
    others: Sequence[Point] = ()
    comparison: tuple[Mapping[str, Any], ...] = ()
    captured: Any = field(default=None, repr=False, compare=False)
    recorded: Any = field(default=None, repr=False, compare=False)

    @cached_property
    def all_points(self) -> PointTable:
        """The frontier's points, followed by the points of other planners that are not among them."""
        points, others = PointTable.of(self.points), PointTable.of(self.others)
        by_others = np.isin(points.column("planner"), others.column("planner"))
        known = {points[row].identity for row in np.flatnonzero(by_others)}
        new = [row for row, point in enumerate(others) if point.identity not in known]
        return points.joined(others.rows(np.array(new, dtype=int)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The display name of the plan of each of :attr:`all_points` (:mod:`tensoropt.plan.plan_names`)."""
        return plan_names(self.all_points, self.spaces, self.model.adapters)

    @cached_property
    def is_dense_transformer(self) -> bool:
        """Whether the model is a transformer without experts; False where its operators were not saved."""
        if self.recorded is None:
            return False
        return is_dense_transformer(op.target for op in self.recorded.graph.operators)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The key of the plan of each of :attr:`all_points` (:mod:`tensoropt.plan.keys`)."""
        step = self.model.fingerprint, str(self.settings.get("optimizer", ""))
        return point_keys(self.all_points, self.spaces, step)

    def title(self, index: int) -> str:
        """Return ``point 17 of 201`` for a point of the frontier, always counted from 1 in order of memory;
        for others, the planner and the number of its plan: ``zero 2 of 5``.
        """
        if index < len(self.points):
            return f"point {index + 1} of {len(self.points)}"
        planner = self.all_points[index].planner
        if planner.startswith(YOUR_JOB):
            return planner_title(planner)
        own = [
            i for i in range(len(self.points), len(self.all_points)) if self.all_points[i].planner == planner
        ]
        return f"{planner} {own.index(index) + 1} of {len(own)}"

    @property
    def devices(self) -> int:
        """The number of devices of the cluster; 0 if nothing was searched."""
        return math.prod(self.spaces[0].mesh.shape) if self.spaces else 0

    @cached_property
    def knee(self) -> int:
        """The index of the frontier's knee: the point from which both memory and time get dearest."""
        return knee(PointTable.of(self.points))
