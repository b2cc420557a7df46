"""The search on meshes with many configurations, where groups combine only the best splits of other meshes.

On a mesh of three axes a group of operators has some hundred configurations (a split for each axis), and
tables and searches grow with the square of that number. Most of them combine splits that are good on no mesh.
So these wide meshes are searched last. For each micro-batch count, a group then combines only the splits over
one axis that unbeaten strategies use most, and those that its sizes ruled out on the other meshes. Notes say
that this may miss strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.restrictions import FREE, Restriction, Restrictions
from tensoropt.costs.source import CostSource, build_tables
from tensoropt.evaluation.problem import Problem
from tensoropt.session.one_space import Built
from tensoropt.session.session import Session
from tensoropt.session.simulations import Simulations
from tensoropt.session.spaces import SpaceSearch
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import Region

MAX_AXES = 3
"""The most axes of a mesh, which bounds the duration of a search; that three are enough is an assumption."""


_MOST_COMBINATIONS = 3**MAX_AXES
"""The most configurations of a group (its axis strategies combined over a mesh's axes) that are all searched;
an assumption. Tables and searches grow with the square: GPT-2 on 2x2x2 has 8 strategies and 512
configurations, and for two micro-batch counts the tables alone took 73 s."""


def _is_wide(mesh: Mesh, graph: GroupGraph) -> bool:
    most = max((len(group.strategies) for group in graph.groups), default=1)
    return mesh.axis_count == MAX_AXES and most**mesh.axis_count > _MOST_COMBINATIONS


_COMBINED = 3
"""The number of axis strategies that a group combines on a wide mesh: those that most of the other meshes'
best strategies use. Three on three axes make 27 configurations. An assumption; with more, or with all, GPT-2
on four nodes, BERT on two and a tiny GPT on two gain in some places what they lose in others."""

Offered = Mapping[tuple[Mesh, int], Restriction]
"""The spaces to be searched, by mesh and micro-batch count, each with its restriction by constraints."""


def tables_of(
    problem: Problem, costs: CostSource, regions: Sequence[Region], offered: Offered
) -> list[Built]:
    """Return the cost tables of spaces (a mesh with a micro-batch count each), in the same order.

    Args:
        regions: the blocks that may be recomputed.
        offered: the spaces, with the configurations to which constraints restrict them.
    """
    meshes = tuple(dict.fromkeys(mesh for mesh, _ in offered))
    counts = tuple(dict.fromkeys(count for _, count in offered))
    limits = {(mesh.label, count): limit for (mesh, count), limit in offered.items()}
    made = build_tables(problem.graph, problem.micro, costs, meshes, counts, regions, limits)
    return [(mesh, tables) for mesh, tables, _ in made]


def apart(
    graph: GroupGraph, meshes: Sequence[Mesh], counts: Sequence[int], left: Restrictions
) -> tuple[Offered, Offered]:
    """Return the spaces (a mesh with a micro-batch count each) to be searched fully, and those on wide
    meshes, to be searched in part. If all meshes are wide, all spaces are searched fully. ``left`` has what
    the user's constraints leave."""
    spaces = {
        (mesh, count): left.spaces[mesh.label, count] if left.spaces is not None else FREE
        for mesh in meshes
        for count in counts
        if left.spaces is None or (mesh.label, count) in left.spaces
    }
    wide = {space: limit for space, limit in spaces.items() if _is_wide(space[0], graph)}
    if len(wide) == len(spaces):
        return spaces, {}
    return {space: limit for space, limit in spaces.items() if space not in wide}, wide


def refine(
    session: Session, build: Callable[[Offered], list[Built]], spaces: SpaceSearch, wide: Offered
) -> tuple[str, ...]:
    """Search the wide meshes after all others; return notes on what was left out.

    Each mesh is searched first at the micro-batch count that most unbeaten strategies have, then at less
    frequent ones, until a coarse search at one count finds no strategy that beats those known.
    """
    notes: list[str] = []
    clock = session.clock
    for mesh in dict.fromkeys(mesh for mesh, _ in wide):
        counts = [count for count in best_counts(spaces.simulations) if (mesh, count) in wide]
        searched: list[int] = []
        better = True
        while better and len(searched) < len(counts):
            count = counts[len(searched)]
            limit = combining(wide[mesh, count], spaces.simulations, count)
            with clock.stage("costs"):
                (built,) = build({(mesh, count): limit})
            with clock.stage("search"):
                better = spaces.add(built)
            searched.append(count)
        if searched:
            with clock.stage("judge"):
                spaces.simulate()
        left = [c for m, c in wide if m == mesh and c not in searched]
        notes += _told(mesh, searched, left, better)
    return tuple(notes)


def best_counts(simulations: Simulations) -> list[int]:
    """Return the micro-batch counts of the unbeaten strategies, the most frequent one first."""
    best = simulations.frontier().origin[:, 0]
    of_space = np.array([space.tables.mesh[0] for space in simulations.spaces])
    counts, frequency = np.unique(of_space[best], return_counts=True)
    return [int(count) for count in counts[np.lexsort((counts, -frequency))]]


def combining(limit: Restriction, simulations: Simulations, count: int) -> Restriction:
    """Return the restriction of a wide mesh by constraints, ``limit``, with a further one: each group of
    operators may combine only those of its splits over one axis that unbeaten strategies at micro-batch
    count ``count`` use most, and those that no mesh searched at it allowed. Groups that constraints keep
    together stay free to combine all."""
    best = simulations.frontier().origin
    graph = simulations.spaces[0].tables.graph
    used = {group.name: Counter[int]() for group in graph.groups}
    tried: dict[str, set[int]] = {group.name: set() for group in graph.groups}
    for number, space in enumerate(simulations.spaces):
        if space.tables.mesh[0] == count:
            for name, counter in space.uses(best[best[:, 0] == number, 1]).items():
                used[name].update(counter)
                # The last axis has the fastest links. Twelve heads that eight ranks cannot split may be split
                # by four.
                tried[name].update(choice[-1] for choice in space.tables.templates[name].choices)
    # Groups that belong together have to keep equal labels, and may use different ones.
    tied = {name for names in limit.together for name in names}
    return replace(
        limit,
        combined={
            group.name: _chosen(used[group.name], set(range(len(group.strategies))) - tried[group.name])
            for group in graph.groups
            if group.name not in tied
        },
    )


def _chosen(used: Counter[int], untried: set[int]) -> tuple[int, ...]:
    # By number, then by position, so that ties are broken the same way in every run.
    ranked = sorted(used, key=lambda position: (-used[position], position))
    return tuple(sorted({*ranked[:_COMBINED], *untried}))


def _told(mesh: Mesh, searched: Sequence[int], left: Sequence[int], better: bool) -> list[str]:
    notes = []
    if searched:
        notes.append(
            f"mesh {mesh.label}, micro-batches {_listed(searched)}: groups combine only the splits that "
            "the best strategies of other meshes use"
        )
    if left:
        why = "on other meshes, every strategy with these counts is beaten by one with another count"
        why = why if better else f"at {searched[-1]} it has no strategy that beats those of other meshes"
        notes.append(f"not searched: mesh {mesh.label}, micro-batches {_listed(left)}: {why}")
    return notes


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(counts)))
