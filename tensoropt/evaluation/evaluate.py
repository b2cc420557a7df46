"""Simulation of the training steps of strategies, whose memory and time become points of a frontier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.prices import ClusterCosts, Prices
from tensoropt.costs.process_memory import named_terms
from tensoropt.costs.source import real_shape
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable
from tensoropt.evaluation.problem import Problem
from tensoropt.ops.layouts import layout_names
from tensoropt.plan.figures import KEPT
from tensoropt.plan.plan import MeshInfo
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.recipes import recipes_of
from tensoropt.sharding.regions import region_of
from tensoropt.sharding.strategy import Strategy
from tensoropt.sharding.zigzag import contiguous_note
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import Overlap, StrategyCandidates, TableCandidates, overlap_of
from tensoropt.simulate.collectives import Collective, collectives, sent_bytes
from tensoropt.simulate.readings import Memo
from tensoropt.simulate.simulator import StepMetrics, simulate
from tensoropt.simulate.step_schedule import step_schedule
from tensoropt.simulate.timed import TimedStep
from tensoropt.types import SOURCES, Indices

CHUNK = 4096
"""The number of strategies simulated at once: enough for numpy to be fast, few enough for memory."""
_SIMULATED = tuple(name for name in KEPT if name in {*dir(StepMetrics), *StepMetrics.__annotations__})
"""The names of the figures that points store and the simulator computes."""


def space_of(problem: Problem, mesh: Mesh, tables: CostTables, notes: Sequence[str]) -> Space:
    """Return the names of all configurations, layouts and options that strategies in these tables have."""
    names = tuple(n for n, size in zip(mesh.names, mesh.shape, strict=True) if size > 1)
    groups = {}
    for group in tables.graph.groups:
        variable = tables.of[group.name]
        labels = [str(s.label) for s in group.strategies]
        groups[group.name] = {
            "micro": str(problem.micro[group.name].label),
            "members": [op.name for op in group.operators],
            "parameters": list(group.parameters),
            "configurations": [[labels[i] for i in c] for c in tables.templates[group.name].choices],
            "options": [
                [[list(layout_names(layout)) for layout in option] for option in options]
                # The plain half: recomputed configurations have the same options (TableBuilder._group).
                for options in variable.options[: len(tables.templates[group.name].choices)]
            ],
        }
    return Space(
        mesh=MeshInfo(shape=real_shape(mesh), names=names),
        micro_batches=tables.mesh[0],
        groups=groups,
        hubs={
            n: [list(layout_names(x)) for x in tables.of[Variable.of_hub(n)].layouts]
            for n in tables.graph.hubs
        },
        shared={
            n: [list(layout_names(x)) for x in tables.of[Variable.of_parameter(n)].layouts]
            for n in tables.graph.shared
        },
        keys=problem.parameter_keys,
        notes=(*notes, *contiguous_note(tables.graph.atoms, tables.mesh)),
        regions={name: region.name for name, region in region_of(tables.regions).items()},
        sequence=problem.sequence,
        recipes={
            region.name: {
                # In a wholly recomputed block, groups whose results nobody needs again run once.
                recipe: "".join(str(int(name in once or name in region.rest)) for name in region.groups)
                for recipe, once in recipes_of(tables.graph, region).items()
            }
            for region in tables.regions
        },
        moves=tuple(tables.moves),
    )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Strategies of the same cost tables with their simulated memory, time and other figures, in order."""

    batch: Batch
    metrics: StepMetrics
    choices: Mapping[str, Indices]
    options: Mapping[str, Indices]

    def point(
        self, row: int, space: Space, number: int, *, additive: tuple[float, float], planner: str = "frontier"
    ) -> Point:
        """Return strategy ``row`` as a point of a frontier, without a proof of optimality.

        Args:
            number: the index of ``space`` (a mesh with a micro-batch count) among those searched.
            additive: memory in bytes and time in seconds by the search's additive cost model.
        """
        p = self.metrics
        of_source = p.sources[row]
        weight = float(of_source.sum()) or 1.0
        names = space.variables
        shares = {s: float(x) / weight for s, x in zip(SOURCES, of_source, strict=True) if x}
        return Point.of(
            **{name: getattr(p, name)[row] for name in _SIMULATED},
            sent_bytes=sent_bytes(self.collectives(row), self.batch.mesh[1:]),
            additive_memory_bytes=additive[0],
            additive_time_s=additive[1],
            memory=p.memory[row],
            terms=named_terms(p.terms[row].tolist()),
            space=number,
            choice=tuple(int(self.choices[n][row]) for n in names),
            options=tuple(
                int(self.options[n][row]) if n in self.options else 0
                for n in (*names, *map(Variable.of_move, space.moves))
            ),
            collectives=tuple((c.kind, c.axes, c.bytes, n) for c, n in sorted(self.collectives(row).items())),
            sources=shares,
            planner=planner,
        )

    def timed(self, row: int = 0) -> TimedStep:
        """Return one strategy's step with the start and end of each event."""
        return TimedStep(self.batch.part(slice(row, row + 1)))

    def collectives(self, row: int) -> Counter[Collective]:
        """Return one strategy's collectives in a step, each with its number of repetitions."""
        return self._collectives[row]

    @cached_property
    def _collectives(self) -> list[Counter[Collective]]:
        return collectives(self.batch)  # all strategies at once take little longer than one


class Evaluator:
    """Simulates strategies of the same cost tables; their step schedule is made once."""

    def __init__(self, tables: CostTables, overlap: Overlap):
        self.candidates, self.prices, self.overlap = TableCandidates(tables), tables.prices, overlap
        self.schedule = step_schedule(self.candidates.graph, self.candidates.regions)
        self.known = Memo()

    def __call__(self, chosen: Sequence[tuple[Mapping[str, int], Mapping[Any, int]]]) -> list[Evaluation]:
        parts = (chosen[start : start + CHUNK] for start in range(0, len(chosen), CHUNK))
        return [self.rows(*self.candidates.rows(part)) for part in parts]

    def rows(self, choices: Mapping[str, Indices], options: Mapping[str, Indices]) -> Evaluation:
        """Simulate strategies; element i of each array belongs to strategy i.

        Args:
            choices: variable of the search -> the indices of the chosen configurations or layouts.
            options: operator group -> the indices of the chosen layouts in which its parameters are stored;
                :meth:`Variable.of_move` of a tensor -> 1 if backward gathers it again, 0 if a copy is saved.
        """
        batch = Batch(self.candidates, choices, options, self.prices, self.overlap, self.known, self.schedule)
        return Evaluation(batch, simulate(batch), choices, options)


def evaluate_strategy(
    strategy: Strategy,
    works: Mapping[str, Workload],
    facts: Mapping[str, Facts],
    prices: Prices,
    overlap: Overlap,
) -> Evaluation:
    """Simulate one strategy, which need not be in a cost table."""
    candidates = StrategyCandidates(strategy, facts, works)
    choices, options = candidates.row()
    batch = Batch(candidates, choices, options, prices, overlap)
    return Evaluation(batch, simulate(batch), choices, options)


def works_of(strategy: Strategy) -> dict[str, Workload]:
    """Return the workload (one rank's work, as data) of each group's configuration."""
    return {
        name: workload(strategy.graph, configuration, strategy.mesh)
        for name, configuration in strategy.configurations.items()
    }


def evaluate_on(strategy: Strategy, mesh: Mesh, costs: ClusterCosts) -> Evaluation:
    """Simulate one strategy on a mesh of a cluster."""
    works = works_of(strategy)
    facts = {name: costs.facts.of(work) for name, work in works.items()}
    prices = Prices.of(costs, strategy.graph, strategy.mesh, costs.communication(mesh))
    return evaluate_strategy(
        strategy, works, facts, prices, overlap_of(costs.cluster, mesh, beside=costs.beside)
    )


def costs_of(evaluated: Sequence[Evaluation]) -> np.ndarray:
    """Return memory in bytes and time in seconds of all strategies, as an array (strategies, 2)."""
    return np.concatenate(
        [np.stack([e.metrics.memory_bytes, e.metrics.time_s], axis=1) for e in evaluated]
        or [np.zeros((0, 2))]
    )
