"""The simulated strategies on all meshes at all micro-batch counts, and their common frontier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable
from tensoropt.evaluation.evaluate import CHUNK, Evaluation, Evaluator
from tensoropt.frontier import Frontier, reduce
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space
from tensoropt.search import Staircase, TrackedFrontier
from tensoropt.simulate.candidates import overlap_of
from tensoropt.types import Floats, Indices

_MARGIN = 0.05
"""The amount by which a strategy's ratio of simulated to summed memory (or time) may be lower than the least
ratio simulated in its space, without the search missing the strategy; an assumption."""

_ChosenIndices = NDArray[np.int32]
"""The dtype of stored choices: big models have thousands in each of thousands of strategies."""


@dataclass(frozen=True, eq=False)
class Simulated:
    """Simulated strategies on one mesh at one micro-batch count, one per row.

    Attributes:
        configurations, options: (n, variables) the strategies' choices as indices, in the order of the cost
            tables.
        additive: (n, 2) memory in bytes and time in seconds as the search summed them.
        costs: (n, 2) memory in bytes and time in seconds as simulated.
        tensors: (n,) simulated memory of tensors alone, in bytes; the search's sums count only tensors.
    """

    configurations: _ChosenIndices
    options: _ChosenIndices
    additive: Floats
    costs: Floats
    tensors: Floats


class SpaceSimulations:
    """The simulated strategies of one mesh at one micro-batch count."""

    def __init__(self, tables: CostTables, mesh: Mesh, cluster: Cluster):
        self.tables, self.mesh, self.cluster = tables, mesh, cluster
        none, costs = np.zeros((0, len(tables.variables)), np.int32), np.zeros((0, 2))
        no_options = np.zeros((0, len(tables.variables) + len(tables.moves)), np.int32)
        self.done = Simulated(none, no_options, costs, costs, np.zeros(0))

    @cached_property
    def evaluator(self) -> Evaluator:
        """The simulator of strategies on this mesh, which caches intermediate results."""
        overlap = overlap_of(self.cluster, self.mesh, beside=self.tables.prices.beside)
        return Evaluator(self.tables, overlap)

    def copy(self) -> SpaceSimulations:
        made = copy(self)
        made.evaluator = self.evaluator
        return made

    @property
    def simulated(self) -> Floats:
        """(n, 2) memory in bytes and time in seconds as simulated."""
        return self.done.costs

    def add_all(self, parts: Sequence[tuple[TrackedFrontier, Indices]]) -> list[Indices]:
        """Simulate points of several frontiers of this space at once, which takes little longer than one
        frontier.

        Return, for each frontier, the indices of its points among the space's simulated strategies.
        """
        chosen = [frontier.strategies(indices) for frontier, indices in parts]
        configurations, options, of_edges = (
            np.concatenate([getattr(one, name) for one in chosen], dtype=np.int32, casting="same_kind")
            for name in ("configurations", "options", "edge_options")
        )
        columns = {edge: column for column, edge in enumerate(chosen[0].edges)} if self.tables.moves else {}
        moves = [columns[edge] for edge in self.tables.moves.values()]
        options = np.concatenate([options, of_edges[:, moves]], axis=1)
        memory = np.concatenate([frontier.memory[indices] for frontier, indices in parts])
        time_s = np.concatenate([frontier.time[indices] for frontier, indices in parts])
        first, parts_done = len(self.simulated), [self.done]
        for start in range(0, len(memory), CHUNK):
            part = slice(start, start + CHUNK)
            metrics = self._evaluated(configurations[part], options[part]).metrics
            costs = np.stack([metrics.memory_bytes, metrics.time_s], axis=1)
            added = np.stack([memory[part], time_s[part]], axis=1)
            tensors = metrics.memory.sum(axis=1)
            parts_done.append(Simulated(configurations[part], options[part], added, costs, tensors))
        columns_of = ([getattr(one, field.name) for one in parts_done] for field in fields(Simulated))
        self.done = Simulated(*map(np.concatenate, columns_of))
        ends = first + np.cumsum([len(indices) for _, indices in parts])
        return [np.arange(end - len(of), end) for (_, of), end in zip(parts, ends.tolist(), strict=True)]

    @property
    def least_shares(self) -> Floats:
        """(2,) the least ratios of simulated to summed memory of tensors, and of simulated to summed time, of
        this mesh's strategies so far, less a margin. All other strategies are expected to exceed them."""
        additive = self.done.additive
        if not len(additive):
            return np.zeros(2)
        with np.errstate(divide="ignore", invalid="ignore"):
            told = np.stack([self.done.tensors, self.simulated[:, 1]], axis=1)
            shares = np.where(additive > 0, told / additive, np.inf)
        return shares.min(axis=0) - _MARGIN

    def uses(self, numbers: Indices) -> dict[str, Counter[int]]:
        """Return how often the strategies ``numbers`` use each split over one axis, by group of operators."""
        tables = self.tables
        found = {group.name: Counter[int]() for group in tables.graph.groups}
        for column, variable in enumerate(tables.variables):
            if variable.key not in found:
                continue
            indices, counts = np.unique(self.done.configurations[numbers, column], return_counts=True)
            for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
                choice = tables.templates[variable.key].choices[tables.position(variable.key, index)]
                found[variable.key].update(dict.fromkeys(choice, count))
        return found

    def points(self, numbers: Indices, space: Space, index: int) -> list[Point]:
        """Return strategies as :class:`Point` objects with all figures.

        The strategies are simulated again, because only their memory and time were stored.

        Args:
            numbers: the strategies' indices among the simulated ones.
            space: the names of all choices on this mesh.
            index: the index of ``space`` among the exploration's spaces.
        """
        found: list[Point] = []
        for start in range(0, len(numbers), CHUNK):
            part = numbers[start : start + CHUNK]
            evaluation = self._evaluated(self.done.configurations[part], self.done.options[part])
            for row, (memory, time_s) in enumerate(self.done.additive[part].tolist()):
                found.append(evaluation.point(row, space, index, additive=(memory, time_s)))
        return found

    def _evaluated(self, configurations: _ChosenIndices, options: _ChosenIndices) -> Evaluation:
        """Simulate strategies, one per row, given by the configurations of all variables and the options of
        groups and of tensors that may be gathered again."""
        keys = [variable.key for variable in self.tables.variables]
        groups = {group.name for group in self.tables.graph.groups}
        moves = [Variable.of_move(name) for name in self.tables.moves]
        # The figures of one variable are contiguous, as the simulator goes through them.
        chosen, own = (np.ascontiguousarray(each.T, dtype=np.int64) for each in (configurations, options))
        choices: dict[str, Indices] = dict(zip(keys, chosen, strict=True))
        of_options = zip((*keys, *moves), own, strict=True)
        return self.evaluator.rows(
            choices, {key: column for key, column in of_options if key in groups or key in moves}
        )


@dataclass
class Simulations:
    """The simulated strategies of all spaces (a mesh with a micro-batch count each)."""

    cluster: Cluster
    spaces: list[SpaceSimulations]

    def add(self, mesh: Mesh, tables: CostTables) -> None:
        self.spaces.append(SpaceSimulations(tables, mesh, self.cluster))

    def copy(self) -> Simulations:
        return replace(self, spaces=[space.copy() for space in self.spaces])

    def frontier(self) -> Frontier:
        """Return the frontier of all simulated strategies."""
        return unbeaten_of(self.spaces)

    def rivals(self, index: int) -> Staircase | None:
        """Return the summed memory and time that a strategy of one space has to beat.

        They are the frontier's simulated costs, divided by the least ratios of simulated to summed costs
        (:attr:`SpaceSimulations.least_shares`); None unless these are positive.
        """
        shares = self.spaces[index].least_shares
        if (shares <= 0).any():
            return None
        known = self.frontier()
        tensors = np.array(
            [self.spaces[space].done.tensors[number] for space, number in known.origin.tolist()]
        )
        # Strategies differ in their communicators: one that is leaner in total may have more tensors.
        return Staircase(np.maximum.accumulate(tensors) / shares[0], known.time / shares[1])


def unbeaten_of(spaces: Sequence[SpaceSimulations]) -> Frontier:
    """Return the frontier of all simulated strategies. Its ``origin`` (n, 2) has for each strategy an index
    in ``spaces``, and the strategy's index among those simulated in that space."""
    sizes = [len(space.simulated) for space in spaces]
    which = np.repeat(np.arange(len(sizes)), sizes)
    number = np.concatenate([np.arange(size) for size in sizes])
    costs = np.concatenate([space.simulated for space in spaces])
    return reduce(costs[:, 0], costs[:, 1], np.stack([which, number], axis=1))
