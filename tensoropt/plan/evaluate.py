"""From tables to points: every strategy is played before it is shown, so no search grades itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.collectives import Collective
from tensoropt.costs.prices import Prices
from tensoropt.costs.source import real_shape
from tensoropt.costs.tables import CostTables
from tensoropt.plan.exploration import Point, Space
from tensoropt.plan.plan import MeshInfo
from tensoropt.plan.problem import Problem
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.placement import layout_names
from tensoropt.sharding.regions import region_of
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Play
from tensoropt.simulate.candidates import Indices, StrategyMenu, TableMenu
from tensoropt.simulate.effects import Piece
from tensoropt.simulate.overlap import Overlap
from tensoropt.simulate.simulator import SOURCES, Played, Walk
from tensoropt.simulate.step_schedule import course_of

CHUNK = 4096
"""Strategies played at once: enough for numpy, few enough for memory."""


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
                for options in variable.options[: len(tables.templates[group.name].choices)]
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
        keys={t.name: str(t.key) for t in problem.graph.atoms.graph.parameters},
        notes=tuple(notes),
        regions={name: region.name for name, region in region_of(tables.regions).items()},
    )


@dataclass(frozen=True)
class Judged:
    """The strategies of one space with the judge's figures, in the order given."""

    play: Play
    played: Played
    choices: Mapping[str, Indices]
    options: Mapping[str, Indices]

    def point(
        self,
        row: int,
        space: Space,
        number: int,
        *,
        additive: tuple[float, float],
        planner: str = "frontier",
    ) -> Point:
        """Strategy ``row`` as a point of space ``number``, of which nothing is proven yet.

        ``additive``: the search's memory and time.
        """
        p = self.played
        total, communication = float(p.total_s[row]), float(p.communication_s[row])
        exposed = float(p.exposed_s[row])
        of_source = p.sources[row]
        weight = float(of_source.sum()) or 1.0
        shares = {s: float(x) / weight for s, x in zip(SOURCES, of_source, strict=True) if x}
        return Point(
            memory_bytes=float(p.memory[row].sum()),
            time_s=total,
            compute_s=float(p.compute_s[row]),
            communication_s=communication,
            exposed_s=exposed,
            hidden_s=max(communication - exposed, 0.0),
            additive_memory_bytes=additive[0],
            additive_time_s=additive[1],
            memory=tuple(float(m) for m in p.memory[row]),
            space=number,
            choice=tuple(int(self.choices[n][row]) for n in space.variables),
            options=tuple(int(self.options[n][row]) if n in self.options else 0 for n in space.variables),
            collectives=tuple((c.kind, c.axes, c.bytes, n) for c, n in sorted(self.collectives(row).items())),
            sources=shares,
            exact=False,
            gap=None,
            planner=planner,
        )

    def collectives(self, row: int) -> Counter[Collective]:
        """What one strategy sends in a step."""
        found: Counter[Collective] = Counter()
        play, micro = self.play, self.play.mesh[0]
        for owner in play.owners:
            for effect in owner.pieces[owner.which[row]].effects:
                times = micro if owner.slots[effect.slot] < play.course.last else 1
                for send in effect.sends:
                    found[Collective(send.kind, send.axes, send.bytes)] += times
        for send in play.reductions(row):
            found[Collective(send.kind, send.axes, send.bytes)] += 1
        return found


class TableJudge:
    """The judge of one space's tables: what it worked out of one strategy it knows for the next."""

    def __init__(self, tables: CostTables, optimizer: str, overlap: Overlap):
        self.menu, self.prices = TableMenu(tables), tables.prices
        self.optimizer, self.overlap = optimizer, overlap
        self.course = course_of(self.menu.graph, self.menu.regions)
        self.known: dict[Hashable, Piece] = {}

    def __call__(self, chosen: Sequence[tuple[Mapping[str, int], Mapping[Any, int]]]) -> list[Judged]:
        """Play strategies, each given as (choice, options); in parts of :data:`CHUNK`."""
        result = []
        for start in range(0, len(chosen), CHUNK):
            choices, options = self.menu.rows(chosen[start : start + CHUNK])
            play = Play(
                self.menu,
                choices,
                options,
                self.optimizer,
                self.prices,
                self.overlap,
                self.known,
                self.course,
            )
            result.append(Judged(play, Walk(play).run(), choices, options))
        return result


def judge(
    tables: CostTables,
    chosen: Sequence[tuple[Mapping[str, int], Mapping[Any, int]]],
    optimizer: str,
    overlap: Overlap,
) -> list[Judged]:
    """Play strategies of the tables, each given as (choice, options); in parts of :data:`CHUNK`."""
    return TableJudge(tables, optimizer, overlap)(chosen)


def judge_strategy(
    strategy: Strategy,
    works: Mapping[str, Workload],
    facts: Mapping[str, Facts],
    prices: Prices,
    optimizer: str,
    overlap: Overlap,
) -> Judged:
    """Play one strategy, which need not be in any table.

    Args:
        works, facts: per group name the workload and facts of its configuration.
    """
    menu = StrategyMenu(strategy, facts, works)
    choices, options = menu.row()
    play = Play(menu, choices, options, optimizer, prices, overlap)
    return Judged(play, Walk(play).run(), choices, options)


def costs_of(judged: Sequence[Judged]) -> np.ndarray:
    """(n, 2) memory and time of all strategies."""
    return np.concatenate(
        [np.stack([j.played.memory.sum(axis=1), j.played.total_s], axis=1) for j in judged]
        or [np.zeros((0, 2))]
    )
