"""Strategies of all spaces, simulated: no strategy is shown by the figures that found it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.tables import CostTables
from tensoropt.frontier import Frontier, reduce
from tensoropt.plan.evaluate import CHUNK, Evaluation, Evaluator
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space
from tensoropt.search import ChosenStrategies, Staircase, TrackedFrontier
from tensoropt.simulate.overlap import overlap_of
from tensoropt.types import Floats, Indices

MARGIN = 0.05
"""How much less memory, or time, a strategy of a space may turn out to need than all of its simulated ones,
as a share of what the search added up, before it is missed; an assumption."""


@dataclass(eq=False)
class SpaceSimulations:
    """Strategies of one space that were simulated.

    Attributes:
        additive: (n, 2) memory and time as the search added them up.
        simulated: (n, 2) memory and time as simulated.
        tensors: (n,) of that memory what tensors take, which is what the search adds up.
    """

    tables: CostTables
    mesh: Mesh
    evaluator: Evaluator
    evaluations: list[Evaluation] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    additive: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    simulated: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    tensors: Floats = field(default_factory=lambda: np.zeros(0))

    def add(self, frontier: TrackedFrontier, indices: Indices) -> Indices:
        """Simulate points of a frontier of this space; their numbers among all of the space."""
        first = len(self.simulated)
        for start in range(0, len(indices), CHUNK):
            part = indices[start : start + CHUNK]
            evaluation = self.evaluator.rows(*rows_of(self.tables, frontier.strategies(part)))
            metrics = evaluation.metrics
            self.rows += [(len(self.evaluations), row) for row in range(len(part))]
            self.evaluations.append(evaluation)
            costs = np.stack([metrics.memory_bytes, metrics.total_s], axis=1)
            added = np.stack([frontier.memory[part], frontier.time[part]], axis=1)
            self.simulated = np.concatenate([self.simulated, costs])
            self.tensors = np.concatenate([self.tensors, metrics.memory.sum(axis=1)])
            self.additive = np.concatenate([self.additive, added])
        return np.arange(first, len(self.simulated))

    @property
    def least_shares(self) -> Floats:
        """(2,) of the memory and the time that the search adds up, the least share that a strategy is taken
        to need."""
        if not len(self.additive):
            return np.zeros(2)
        with np.errstate(divide="ignore", invalid="ignore"):
            told = np.stack([self.tensors, self.simulated[:, 1]], axis=1)
            shares = np.where(self.additive > 0, told / self.additive, np.inf)
        return shares.min(axis=0) - MARGIN

    def uses(self, numbers: Indices) -> dict[str, Counter[int]]:
        """Of strategies by number, per group how many use each of its axis strategies, by position."""
        tables, found = self.tables, {group.name: Counter[int]() for group in self.tables.graph.groups}
        for which, row in (self.rows[number] for number in numbers.tolist()):
            for name, counter in found.items():
                index = tables.position(name, int(self.evaluations[which].choices[name][row]))
                counter.update(set(tables.templates[name].choices[index]))
        return found

    def point(self, number: int, space: Space, index: int) -> Point:
        """Strategy ``number`` as a point of space ``index``."""
        which, row = self.rows[number]
        memory, time_s = self.additive[number].tolist()
        return self.evaluations[which].point(row, space, index, additive=(memory, time_s))


class Simulations:
    """Strategies of all spaces that were simulated."""

    def __init__(self, cluster: Cluster, spaces: Sequence[tuple[Mesh, CostTables]]):
        self.cluster = cluster
        self.spaces: list[SpaceSimulations] = []
        for mesh, tables in spaces:
            self.add(mesh, tables)

    def add(self, mesh: Mesh, tables: CostTables) -> None:
        """One more space, of which nothing is simulated yet."""
        evaluator = Evaluator(tables, overlap_of(self.cluster, mesh))
        self.spaces.append(SpaceSimulations(tables, mesh, evaluator))

    def __len__(self) -> int:
        return sum(len(space.simulated) for space in self.spaces)

    def frontier(self) -> Frontier:
        """What none of them beats."""
        return unbeaten_of(self.spaces)

    def rivals(self, index: int, *, capped: bool = False) -> Staircase | None:
        """What a strategy of a space has to beat, in memory and time as the search adds them up: it is taken
        to need at least the least shares of the space's simulated strategies.

        Args:
            capped: of strategies under a cap on working memory, which may add less to what is kept than any
                of those that were simulated: they are taken to need no more than the sum.
        """
        shares = self.spaces[index].least_shares
        if capped:
            shares = np.minimum(shares, [1.0, np.inf])
        if (shares <= 0).any():
            return None
        known = self.frontier()
        tensors = np.array([self.spaces[space].tensors[number] for space, number in known.origin.tolist()])
        # Of communicators one strategy has more than another: what is leaner in all may have more tensors.
        return Staircase(np.maximum.accumulate(tensors) / shares[0], known.time / shares[1])


def unbeaten_of(spaces: Sequence[SpaceSimulations]) -> Frontier:
    """What no simulated strategy beats, by simulated costs; ``origin`` (n, 2): the space, and the number
    there."""
    sizes = [len(space.simulated) for space in spaces]
    which = np.repeat(np.arange(len(sizes)), sizes)
    number = np.concatenate([np.arange(size) for size in sizes])
    costs = np.concatenate([space.simulated for space in spaces])
    return reduce(costs[:, 0], costs[:, 1], np.stack([which, number], axis=1))


def rows_of(tables: CostTables, chosen: ChosenStrategies) -> tuple[dict[str, Indices], dict[str, Indices]]:
    """Strategies of the search as one array per variable, and one per group of its options."""
    place = {name: column for column, name in enumerate(chosen.names)}
    choices: dict[str, Indices] = {v.key: chosen.configurations[:, place[v.key]] for v in tables.variables}
    return choices, {g.name: chosen.options[:, place[g.name]] for g in tables.graph.groups}
