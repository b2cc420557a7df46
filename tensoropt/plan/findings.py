"""The data of an exploration; :class:`~tensoropt.exploration.exploration.Exploration` adds the methods.

Code for files, CSVs, tables and plots needs only the data. It imports this module, not that class, which in
turn imports that code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.costs.device_fit import DeviceFit, Verdict, room_bytes, usable_bytes, verdict_on
from tensoropt.frontier import knee
from tensoropt.plan.graph_facts import GraphFacts, Weights
from tensoropt.plan.needs import point_needs
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.plan_names import YOUR_JOB, plan_names, planner_title
from tensoropt.plan.point import Point
from tensoropt.plan.point_table import PointTable
from tensoropt.plan.space import Space
from tensoropt.units import headroom_bytes


@dataclass(frozen=True, eq=False)
class SavedCosts:
    """The saved operator graph and costs of an exploration, parsed on first use, as that imports PyTorch.

    Attributes:
        facts: a summary of the graph, enough for plan names and for tokens per second; None if there is none.
        content, path: the content of the file, and the path from which it was read.
    """

    facts: GraphFacts | None
    content: bytes
    path: Path

    @cached_property
    def recorded(self) -> Any:
        from tensoropt.plan.recorded import read_recorded

        return read_recorded(self.content, self.path)

    def save(self, path: Path) -> None:
        path.write_bytes(self.content)


@dataclass(frozen=True)
class Findings:
    """The points of an exploration, the choices that were searched for them, and a report on the run.

    Attributes:
        points: the frontier, ascending in memory, strictly descending in time.
        spaces: the searched meshes and micro-batch counts, each with the names of all choices on it.
        model, cluster, settings, versions: what was explored, as in the fields of these names of
            :class:`~tensoropt.plan.plan.Plan`.
        report: statistics of the run: operators, groups, coverage, duration of each stage in seconds, notes.
        others: points of other planners in the same spaces, each with its planner's name.
        comparison: each planner's result (:class:`~tensoropt.exploration.export.Compared`).
        costs: the operator graph and the costs used (:class:`~tensoropt.plan.recorded.Recorded`, or
            :class:`SavedCosts`); None if an operator has an argument that no file can hold.
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
    costs: Any = field(default=None, repr=False, compare=False)

    @property
    def recorded(self) -> Any:
        """The operator graph and the costs used; reading saved ones imports PyTorch."""
        return self.costs.recorded if isinstance(self.costs, SavedCosts) else self.costs

    @cached_property
    def graph_facts(self) -> GraphFacts | None:
        """The summary of the operator graph (for plan names and rates); None if the graph was not saved."""
        if isinstance(self.costs, SavedCosts):
            return self.costs.facts
        return None if self.recorded is None else GraphFacts.of(self.recorded.graph, self.cluster)

    @cached_property
    def all_points(self) -> PointTable:
        """The frontier's points, followed by those points of other planners that are not on the frontier."""
        by = {point.planner for point in self.others}
        known = {point.identity for point in self.points if point.planner in by}
        return PointTable((*self.points, *(p for p in self.others if p.identity not in known)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The display name of each of :attr:`all_points` (:mod:`tensoropt.plan.plan_names`)."""
        return plan_names(self.all_points, self.spaces, self.model.adapters, self.weights)

    @property
    def weights(self) -> Weights:
        """The durations of operators and sizes of parameters that decide what plan names mention."""
        return Weights() if self.graph_facts is None else self.graph_facts.weights

    def title(self, index: int) -> str:
        """Return ``point 17 of 201`` for a point of the frontier, else ``zero 2 of 5``: a planner, and the
        number from 1 among its plans; for a user's job its title."""
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
        """The index of the frontier's knee (farthest below the line between its ends, in log scale) among the
        points that fit a device; among all points if none fits."""
        return self.knee_within(self.limit_bytes)

    def knee_within(self, limit_bytes: float) -> int:
        """Return the index of the knee among the points within a memory limit (among all if none is)."""
        rows = self.within(limit_bytes)
        rows = rows if len(rows) else np.arange(len(self.points))
        return int(rows[knee(PointTable([self.points[row] for row in rows.tolist()]))])

    def within(self, limit_bytes: float) -> np.ndarray:
        """Return the indices of the frontier's points that need at most ``limit_bytes`` per device,
        ascending."""
        found: np.ndarray = np.flatnonzero(self.needs[: len(self.points)] <= limit_bytes)
        return found

    @cached_property
    def _device(self) -> Cluster | None:
        return Cluster.from_dict(self.cluster) if self.cluster.get("devices") else None

    @property
    def device_bytes(self) -> float:
        """The memory of the smallest device in bytes; infinite if unknown."""
        return float(min((kind["memory_bytes"] for kind in self.cluster.get("kinds", ())), default=math.inf))

    @cached_property
    def needs(self) -> np.ndarray:
        """(points,) the memory in bytes that each of :attr:`all_points` needs on a device."""
        fits = (point_needs(point, self.spaces, self._device, 0.0) for point in self.all_points)
        return np.array([fit.needed_bytes for fit in fits])

    @property
    def limit_bytes(self) -> float:
        """The most memory in bytes that a plan may need on a device: the exploration's budget, or else a
        device's memory less the usual headroom."""
        return self.usable_bytes(self.settings.get("memory_bytes"))

    def usable_bytes(self, budget_bytes: float | None = None, headroom: float | str | None = None) -> float:
        """Return the most memory in bytes that a plan may need on a device, within a budget and a headroom.
        The headroom is the memory to keep free: a share of the device's, or text such as ``2GiB``
        (:func:`~tensoropt.costs.device_fit.usable_bytes`)."""
        whole = self.device_bytes
        if isinstance(headroom, str):
            headroom = headroom_bytes(headroom, whole) / whole
        return usable_bytes(whole, budget_bytes, headroom)

    def verdict(self, index: int, budget_bytes: float | None = None) -> Verdict:
        """Return whether a point fits the smallest device, or a memory budget in bytes."""
        is_gpu = self._device is not None and self._device.device_type == "cuda"
        room = room_bytes(self.device_bytes, budget_bytes)
        return verdict_on(float(self.needs[index]), room, estimated=is_gpu)

    def fit(self, index: int, budget_bytes: float | None = None) -> DeviceFit:
        """Return a point's memory need, compared with the smallest device or with a budget in bytes."""
        point, room = self.all_points[index], room_bytes(self.device_bytes, budget_bytes)
        return point_needs(point, self.spaces, self._device, room)
