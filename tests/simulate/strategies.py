"""Strategies written by hand, and what the simulator needs to know of their groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import workload
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
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
