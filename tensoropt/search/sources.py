"""Where strategies come from: hull vertices, crossovers, passes. Each can rebuild any of its points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tensoropt.search.costgraph import FloatArray
from tensoropt.search.crossover import Mixes, unmix
from tensoropt.search.engine import Pass
from tensoropt.search.hull import Hull
from tensoropt.search.problem import Problem
from tensoropt.search.program import Program
from tensoropt.search.result import Choice
from tensoropt.search.unroll import choice_of, unroll


class Source(Protocol):
    """Strategies with their costs (n,), in any order; ``rebuild(i)`` gives the i-th in the caller's names."""

    @property
    def memory(self) -> FloatArray: ...

    @property
    def time(self) -> FloatArray: ...

    def rebuild(self, index: int) -> Choice: ...


@dataclass(frozen=True, eq=False, slots=True)
class VertexSource:
    problem: Problem
    hull: Hull

    @property
    def memory(self) -> FloatArray:
        return self.hull.memory

    @property
    def time(self) -> FloatArray:
        return self.hull.time

    def rebuild(self, index: int) -> Choice:
        return choice_of(self.problem, self.hull.picks[index])


@dataclass(frozen=True, eq=False, slots=True)
class MixSource:
    problem: Problem
    hull: Hull
    mixes: Mixes

    @property
    def memory(self) -> FloatArray:
        return self.mixes.memory

    @property
    def time(self) -> FloatArray:
        return self.mixes.time

    def rebuild(self, index: int) -> Choice:
        m = self.mixes
        picks = self.hull.picks[int(m.head[index])], self.hull.picks[int(m.tail[index])]
        return choice_of(self.problem, unmix(self.problem, *picks, int(m.cut[index])))


@dataclass(frozen=True, eq=False, slots=True)
class PassSource:
    program: Program
    result: Pass

    @property
    def memory(self) -> FloatArray:
        return self.result.tables[self.program.logical[self.program.root].table].memory

    @property
    def time(self) -> FloatArray:
        return self.result.tables[self.program.logical[self.program.root].table].time

    def rebuild(self, index: int) -> Choice:
        return choice_of(self.program.problem, unroll(self.program, self.result, index))
