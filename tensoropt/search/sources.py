"""Sources of strategies: hull vertices, crossovers, passes. Each can rebuild any of its points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tensoropt.search.crossover import Mixes, unmix
from tensoropt.search.engine import Pass
from tensoropt.search.hull import Hull
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.result import ChosenStrategies
from tensoropt.search.unroll import chosen_strategies, unroll
from tensoropt.types import Floats, Indices


class Source(Protocol):
    """Strategies with their costs (n,), in any order; ``rebuild`` returns some of them, in the caller's
    names."""

    @property
    def memory(self) -> Floats: ...

    @property
    def time(self) -> Floats: ...

    def rebuild(self, indices: Indices) -> ChosenStrategies: ...


@dataclass(frozen=True, eq=False, slots=True)
class VertexSource:
    """The vertices of a hull, whose picks are already known."""

    reduced: ReducedGraph
    hull: Hull

    @property
    def memory(self) -> Floats:
        return self.hull.memory

    @property
    def time(self) -> Floats:
        return self.hull.time

    def rebuild(self, indices: Indices) -> ChosenStrategies:
        return chosen_strategies(self.reduced, np.stack([self.hull.picks[i] for i in indices.tolist()]))


@dataclass(frozen=True, eq=False, slots=True)
class MixSource:
    """Prefix mixes of two hull vertices, put together on demand."""

    reduced: ReducedGraph
    hull: Hull
    mixes: Mixes

    @property
    def memory(self) -> Floats:
        return self.mixes.memory

    @property
    def time(self) -> Floats:
        return self.mixes.time

    def rebuild(self, indices: Indices) -> ChosenStrategies:
        m = self.mixes
        head, tail, cut = (np.asarray(of[indices], np.int64) for of in (m.head, m.tail, m.cut))
        return chosen_strategies(self.reduced, unmix(self.reduced, self.hull.picks, head, tail, cut))


@dataclass(frozen=True, eq=False, slots=True)
class PassSource:
    """Points at the root of a pass; its tables stay in memory, since strategies are unrolled from them."""

    program: Program
    result: Pass

    @property
    def memory(self) -> Floats:
        return self.result.tables[self.program.logical[self.program.root].table].memory

    @property
    def time(self) -> Floats:
        return self.result.tables[self.program.logical[self.program.root].table].time

    def rebuild(self, indices: Indices) -> ChosenStrategies:
        return chosen_strategies(self.program.reduced, unroll(self.program, self.result, indices))
