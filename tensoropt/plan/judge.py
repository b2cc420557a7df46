"""From tables to points: every strategy is played before it is shown, so no search grades itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.cluster import Mesh
from tensoropt.costs.collectives import predicted_collectives
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.facts import Facts
from tensoropt.costs.source import real_shape
from tensoropt.costs.tables import CostTables
from tensoropt.plan.exploration import MEMORY_KINDS, Point, Space
from tensoropt.plan.plan import MeshInfo
from tensoropt.plan.problem import Problem
from tensoropt.plan.simulate import simulate
from tensoropt.sharding.placement import layout_names
from tensoropt.sharding.strategy import Strategy


def facts_of_strategy(tables: CostTables, choice: Mapping[str, int]) -> dict[str, Facts]:
    return {g.name: tables.templates[g.name].facts[choice[g.name]] for g in tables.graph.groups}


def space_of(problem: Problem, mesh: Mesh, tables: CostTables, notes: Sequence[str]) -> Space:
    """The names of everything that can be chosen in these tables."""
    names = tuple(n for n, size in zip(mesh.names, mesh.shape, strict=True) if size > 1)
    groups = {}
    for group in tables.graph.groups:
        variable = tables.by_name[group.name]
        labels = [group.strategies[i].label for i in range(len(group.strategies))]
        groups[group.name] = {
            "micro": problem.micro[group.name].label,
            "members": [op.name for op in group.operators],
            "parameters": list(group.parameters),
            "configurations": [[labels[i] for i in c] for c in tables.templates[group.name].choices],
            "options": [
                [[list(layout_names(home)) for home in option] for option in options]
                for options in variable.options
            ],
        }
    return Space(
        mesh=MeshInfo(shape=real_shape(mesh), names=names),
        micro_batches=tables.mesh[0],
        groups=groups,
        hubs={
            n: [list(layout_names(x)) for x in tables.by_name[f"hub:{n}"].layouts] for n in tables.graph.hubs
        },
        shared={
            n: [list(layout_names(x)) for x in tables.by_name[f"parameter:{n}"].layouts]
            for n in tables.graph.shared
        },
        keys={t.name: str(t.key) for t in problem.captured.graph.parameters},
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Judged:
    """A strategy with the judge's figures; bytes and seconds of one rank and step.

    ``memory`` is the peak by kind, ``additive`` what the search added up.
    """

    choice: Mapping[str, int]
    options: Mapping[Any, int]
    strategy: Strategy
    facts: Mapping[str, Facts]
    memory: tuple[float, ...]
    additive: float
    compute: float
    communication: float

    @property
    def memory_bytes(self) -> float:
        return float(sum(self.memory))

    @property
    def time_s(self) -> float:
        return self.compute + self.communication


def judge(
    tables: CostTables, choice: Mapping[str, int], options: Mapping[Any, int], optimizer: str
) -> Judged:
    """Play one strategy of the tables."""
    strategy = tables.strategy(choice, options)
    facts = facts_of_strategy(tables, choice)
    peak = simulate(strategy, facts, optimizer).peak
    memory = tuple(float(getattr(peak, kind)) for kind in MEMORY_KINDS)
    return Judged(choice, options, strategy, facts, memory, *tables.breakdown(choice, options))


def point_of(
    judged: Judged,
    space: Space,
    number: int,
    communication: CommunicationModel,
    *,
    exact: bool,
    gap: float,
    compute_source: str,
) -> Point:
    """A judged strategy as a point of space ``number``: what it sends, where its figures come from."""
    found = predicted_collectives(judged.strategy, judged.facts)
    total = judged.time_s or 1.0
    sources = {compute_source: judged.compute / total}
    weights: dict[str, float] = {}
    for c, count in found.items():
        source = communication.source(c.kind, c.axes)
        weights[source] = weights.get(source, 0.0) + communication.time_s(c.kind, c.axes, c.bytes) * count
    for source, weight in weights.items():
        share = judged.communication / total * weight / (sum(weights.values()) or 1.0)
        sources[source] = sources.get(source, 0.0) + share
    return Point(
        memory_bytes=judged.memory_bytes,
        time_s=judged.time_s,
        compute_s=judged.compute,
        communication_s=judged.communication,
        additive_memory_bytes=judged.additive,
        memory=judged.memory,
        space=number,
        choice=tuple(judged.choice[n] for n in space.variables),
        options=tuple(int(judged.options.get(n, 0)) for n in space.variables),
        collectives=tuple((c.kind, c.axes, c.bytes, n) for c, n in sorted(found.items())),
        sources=sources,
        exact=exact,
        gap=gap,
    )
