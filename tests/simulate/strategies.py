"""Strategies written by hand, and what the simulator needs to know of their groups."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tensoropt.costs.prices import free_prices
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import workload
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.simulate.simulator import StepColumns, simulate
from tests.costs.models import facts_of


def written(graph: GroupGraph, mesh: Sequence[int], labels: Any, stored: Any, hubs: Any = None) -> Strategy:
    """A strategy from the labels of groups and the stored placements of parameters, each by name, in order,
    or one list of words for all."""

    def each(given: Any, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        if isinstance(given, Mapping):
            return given
        alike = all(isinstance(one, str) for one in given)
        return dict.fromkeys(names, given) if alike else dict(zip(names, given, strict=True))

    groups = [group.name for group in graph.groups]
    parameters = [tensor.name for tensor in graph.atoms.graph.parameters]
    data = {"mesh": list(mesh), "groups": each(labels, groups), "stored": each(stored, parameters)}
    return Strategy.from_data(data | {"hubs": hubs or {}}, graph)


def facts_by_group(strategy: Strategy, training: bool = True) -> dict[str, Facts]:
    return {
        name: facts_of(workload(strategy.graph, configuration, strategy.mesh), training)
        for name, configuration in strategy.configurations.items()
    }


def memory_curve(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> SimpleNamespace:
    """The bytes of a step: ``points``, of each moment that needs or computes something (kept, transient), and
    its ``peak`` by kind, in all, and its moment."""
    candidates = StrategyCandidates(strategy, facts)
    batch = Batch(candidates, *candidates.row(), free_prices(strategy.graph, strategy.mesh, optimizer))
    columns, points = StepColumns(batch), dict[str, tuple[int, int]]()
    alive = (np.cumsum(columns.kept[:, 0]), np.cumsum(columns.transient[:, 0]), columns.workspace[:, 0])
    for moment, *sizes in zip(batch.schedule.moments, *(of_kind.tolist() for of_kind in alive), strict=False):
        kept, transient, workspace = map(int, sizes)
        if workspace or moment.kind in ("compute", "step"):
            now = kept, transient + workspace
            points[moment.words] = max(points.get(moment.words, now), now, key=sum)
    peak = dict(zip(MEMORY_KINDS, map(int, simulate(batch).memory[0]), strict=True))
    at = max(points, key=lambda moment: sum(points[moment]))
    return SimpleNamespace(points=points, peak=SimpleNamespace(**peak, total=sum(peak.values()), moment=at))
