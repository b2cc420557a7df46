"""The strategy for calling a planned model in eval mode, where inputs may have other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from tensoropt.errors import PlanError
from tensoropt.ops.layouts import REPLICATE, Layout
from tensoropt.sharding.configurations import (
    AxisSizes,
    Configuration,
    MicroBatchRefused,
    batch_strategies,
    fits,
    micro_batch_strategies,
)
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph, batch_inputs
from tensoropt.sharding.strategy import Strategy


def results_by_rows(graph: GroupGraph) -> frozenset[str]:
    """Return the names of the model's results whose first dim is the batch, with samples in order."""
    followed = batch_strategies(graph, everywhere=False)
    source = graph.atoms.graph
    by_rows = {
        name
        for group in graph.groups
        for name in group.writes
        if group.name in followed and followed[group.name].placements[name] == 0
    }
    return frozenset(source.outputs) & by_rows.union(batch_inputs(source))


def rows_are_apart(graph: GroupGraph) -> bool:
    """Return whether the model computes each sample of the batch independently, except in losses."""
    try:
        micro_batch_strategies(graph)
    except MicroBatchRefused:
        return False
    return True


def evaluating_strategy(
    plan: Strategy,
    graph: GroupGraph,
    planned: Mapping[str, str],
    along: tuple[int, ...],
    given: Mapping[str, Configuration] = MappingProxyType({}),
) -> Strategy:
    """Return a strategy for a call in eval mode, on the plan's stored parameters, with one micro-batch.

    Args:
        graph: the inference graph of the call.
        planned: parameter in this graph -> its name in the plan; other parameters are whole on every rank.
        along: the mesh axes that divide the batch among the ranks.
        given: group -> a configuration to use in place of the plan's.

    Raises:
        PlanError: a sharded parameter's dims have other factors (atoms) in the call than in the plan.
    """
    mesh = (1, *plan.mesh[1:])
    followed = batch_strategies(graph, everywhere=False)
    configurations = {
        group.name: given.get(group.name)
        or _configuration(plan, graph, group, mesh, followed.get(group.name, group.unsplit), along)
        for group in graph.groups
    }
    parts = prod(mesh[axis] for axis in along)
    whole = (REPLICATE,) * len(mesh)
    stored = {
        name: _stored(plan, graph, name, planned[name]) if name in planned else whole
        for name in (tensor.name for tensor in graph.atoms.graph.parameters)
    }
    strategy = Strategy(graph, mesh, configurations, {}, stored)
    made = strategy.made
    return replace(
        strategy,
        hubs={hub: _hub(plan, graph, hub, configurations, made) for hub in graph.hubs},
        leaving={
            name: (made[name][0], *(0 if axis in along else REPLICATE for axis in range(1, len(mesh))))
            for name in results_by_rows(graph)
            if name in made and along and graph.atoms.atom_sizes(name)[0] % parts == 0
        },
    )


def _configuration(
    plan: Strategy,
    graph: GroupGraph,
    group: Group,
    mesh: AxisSizes,
    followed: AxisStrategy,
    along: tuple[int, ...],
) -> Configuration:
    available = {str(strategy.label): strategy for strategy in group.strategies}
    chosen = [group.unsplit]
    for axis in range(1, len(mesh)):
        by_default = followed if axis in along else group.unsplit
        known = plan.configurations.get(group.name)
        label = "" if known is None else str(known.strategies[axis].label)
        chosen.append(available.get(label, by_default))
    for axis in range(len(mesh) - 1, 0, -1):
        if fits(graph.atoms, group, tuple(chosen), mesh):
            break
        chosen[axis] = group.unsplit
    return Configuration(group, tuple(chosen))


def _hub(
    plan: Strategy,
    graph: GroupGraph,
    hub: str,
    configurations: Mapping[str, Configuration],
    made: Mapping[str, Layout],
) -> Layout:
    wanted = plan.hubs.get(hub, ())[1:]
    readers = (configurations[group.name].layout(hub) for group in graph.groups if hub in group.reads)
    return next((layout for layout in (made[hub], *readers) if layout[1:] == wanted), made[hub])


def _stored(plan: Strategy, graph: GroupGraph, name: str, planned: str) -> Layout:
    layout = (REPLICATE, *(max(code, REPLICATE) for code in plan.stored[planned][1:]))
    split = any(code >= 0 and size > 1 for code, size in zip(layout, plan.mesh, strict=True))
    if split and graph.atoms.atoms[name] != plan.atoms(planned):
        raise PlanError(
            f"the plan splits the parameter {plan.tensor(planned).key} with its dims factored as "
            f"{plan.atoms(planned)}, but this call needs {graph.atoms.atoms[name]}; evaluate with the module "
            "that `with tensoropt.whole(model) as plain:` gives"
        )
    return layout
