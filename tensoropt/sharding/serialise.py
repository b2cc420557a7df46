"""Strategies as plain data: labels and placement names, ready for JSON or for another process.

Only names are written; their meaning comes from the model's graph on the reading side, so a plan for another
model is refused at the first name that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from tensoropt.errors import PlanError, closest
from tensoropt.ops.layouts import Layout, layout_names, placement_code
from tensoropt.sharding.configurations import AxisSizes, Configuration, fits
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.regions import Region, find_regions
from tensoropt.sharding.storage import Gather, Storage
from tensoropt.sharding.strategy import Strategy


def strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    """Return the strategy as data: the mesh, one label per group and axis (the micro-batch axis first), one
    placement name per axis for each hub and parameter, and the names of the recomputed regions."""
    return {
        "mesh": list(strategy.mesh),
        "groups": {
            name: [str(s.label) for s in configuration.strategies]
            for name, configuration in strategy.configurations.items()
        },
        "hubs": {name: list(layout_names(layout)) for name, layout in strategy.hubs.items()},
        "stored": {name: list(layout_names(layout)) for name, layout in strategy.stored.items()},
        "recomputed": [region.name for region in strategy.recomputed],
    }


def strategy_from_dict(data: Mapping[str, Any], graph: GroupGraph) -> Strategy:
    """Inverse of :func:`strategy_to_dict` for the same model.

    Raises:
        PlanError: the data does not describe a strategy of this graph; the message names the first
            difference.
    """
    mesh = _mesh(data.get("mesh"))
    groups = _section(data, "groups", (g.name for g in graph.groups))
    hubs = _section(data, "hubs", graph.hubs)
    parameters = [t.name for t in graph.atoms.graph.parameters]
    stored = _section(data, "stored", parameters)
    return Strategy(
        graph=graph,
        mesh=mesh,
        configurations={g.name: _configuration(graph, g, groups[g.name], mesh) for g in graph.groups},
        hubs={name: _layout(graph, "hub", name, hubs[name], mesh) for name in graph.hubs},
        stored={name: _layout(graph, "parameter", name, stored[name], mesh) for name in parameters},
        recomputed=_regions(graph, data.get("recomputed", ())),
    )


def _regions(graph: GroupGraph, names: Sequence[str]) -> tuple[Region, ...]:
    available = {r.name: r for r in find_regions(graph)} if names else {}
    for name in names:
        if name not in available:
            raise PlanError(
                f"the plan recomputes {name}, which is no repeated block of this model; "
                f"it has: {', '.join(available) or 'none'}"
            )
    return tuple(r for r in available.values() if r.name in names)


def _mesh(value: Any) -> AxisSizes:
    whole = isinstance(value, Sequence) and all(isinstance(n, int) and n >= 1 for n in value)
    if not whole or not value:
        raise PlanError(f"the plan's mesh {value!r} is not a list of sizes: micro-batches, then one per axis")
    return tuple(value)


def _section(data: Mapping[str, Any], section: str, expected: Iterable[str]) -> Mapping[str, Any]:
    found = data.get(section)
    if not isinstance(found, Mapping):
        raise PlanError(f"the plan has no '{section}'; it is not a strategy")
    # A dict for its order: the first difference in the graph's order is the one that is reported.
    names = dict.fromkeys(expected)
    for name in names:
        if name not in found:
            raise PlanError(f"the plan says nothing about {name} ({section}); it is for another model")
    for name in found:
        if name not in names:
            hint = "".join(f" (nearest: {near})" for near in closest(name, names, most=1))
            raise PlanError(f"the plan names {name} ({section}), which this model does not have{hint}")
    return found


def _per_axis(what: str, value: Any, mesh: AxisSizes) -> Sequence[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(mesh):
        raise PlanError(f"{what}: expected {len(mesh)} names, one per mesh axis, but the plan has {value!r}")
    return value


def _configuration(graph: GroupGraph, group: Group, labels: Any, mesh: AxisSizes) -> Configuration:
    available = {str(s.label): s for s in group.strategies}
    chosen = []
    for label in _per_axis(group.name, labels, mesh):
        if label not in available:
            raise PlanError(f"{group.name} cannot be split as '{label}'; it has: {', '.join(available)}")
        chosen.append(available[label])
    configuration = Configuration(group, tuple(chosen))
    # Labels alone can be valid although they do not divide the model's own sizes, for example after an edit
    # of the plan or the mesh.
    if not fits(graph.atoms, group, configuration.strategies, mesh):
        raise PlanError(
            f"{group.name} does not divide as {'/'.join(labels)} over the mesh {'x'.join(map(str, mesh))}"
        )
    return configuration


def _layout(graph: GroupGraph, what: str, name: str, names: Any, mesh: AxisSizes) -> Layout:
    sizes = graph.atoms.atom_sizes(name)
    try:
        layout = tuple(placement_code(n) for n in _per_axis(f"{what} {name}", names, mesh))
    except (ValueError, AttributeError) as error:
        raise PlanError(f"{what} {name}: {error}") from None
    if what != "parameter" and Storage.of(layout).gather is not Gather.EACH_USE:
        raise PlanError(f"{what} {name}: only parameters are held or gathered ahead, not {names[0]!r}")
    if any(Storage.of((code,)).gather is not Gather.EACH_USE for code in layout[1:]):
        raise PlanError(
            f"{what} {name}: held, held/P and ahead belong on the micro-batch axis, the first of {names}"
        )
    for code in layout:
        # Negative codes pass, because a replicated or partial placement needs no atom.
        if code >= len(sizes):
            raise PlanError(
                f"{what} {name} has {len(sizes)} parts that can be split, so S({code}) is impossible"
            )
        parts = prod(mesh[axis] for axis, c in enumerate(layout) if c == code)
        if code >= 0 and parts > sizes[code]:
            raise PlanError(
                f"{what} {name} is split {parts} ways as S({code}), which has only {sizes[code]} elements"
            )
    return layout
