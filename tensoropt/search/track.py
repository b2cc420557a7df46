"""track_frontier: cost graph -> frontier."""

from __future__ import annotations

import math

import numpy as np

from tensoropt.frontier import merge
from tensoropt.search.costgraph import CostGraph
from tensoropt.search.engine import Engine, Messages, Pass
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.limits import corners_of
from tensoropt.search.order import greedy_order
from tensoropt.search.problem import build_problem
from tensoropt.search.program import Builder, Program
from tensoropt.search.result import TrackedFrontier
from tensoropt.search.scalar import flatten
from tensoropt.search.unroll import unroll_point, unroll_vertex

METHODS = ("auto", "ldp", "elimination")
LINES = 32
DEBUG = False


def track_frontier(
    graph: CostGraph,
    *,
    epsilon: float = 0.0,
    method: str = "auto",
    max_points: int | None = None,
    threads: int | None = None,
) -> TrackedFrontier:
    """The cost frontier of ``graph``; see DESIGN section 7."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if not len(graph):
        one = np.zeros(1)
        return TrackedFrontier(one, one, True, (), lambda _: ({}, {}), lambda m: 0.0 if m >= 0 else math.inf)
    problem = build_problem(graph)
    builder = Builder(problem)
    order, _ = greedy_order(problem, 0.1)
    for v in order:
        builder.eliminate(v)
    program = builder.finish()
    search = HullSearch(program, flatten(program))
    hull = search.run(LINES)
    if hull is None:
        raise ValueError("no strategy is possible: every combination meets an inf entry; loosen a table")
    inside, outside = search.messages()
    engine = Engine(program, threads)
    passes: list[Pass] = []
    known = merge([hull])
    for most in (16, 128, 0):
        corners = corners_of(hull, known.memory, known.time, 256)
        passes.append(engine.run(Messages(inside, outside, corners), most))
        root = passes[-1].tables[program.logical[program.root].table]
        if DEBUG:
            print(most, passes[-1].points, len(root.memory))
        known = merge([known, root])
        if not passes[-1].thinned:
            break
    return _result(program, hull, passes)


def _result(program: Program, hull: Hull, passes: list[Pass]) -> TrackedFrontier:
    exact = not passes[-1].thinned
    if exact:
        passes = passes[-1:]
    root = program.logical[program.root].table
    sources = [*(p.tables[root] for p in passes[::-1]), hull]
    found = merge(sources[:1] if exact else sources)
    tolerance = program.problem.memory_tolerance

    def unroll(index: int):
        which, point = found.origin[index].tolist()
        if which < len(passes):
            return unroll_point(program, passes[::-1][which], point)
        return unroll_vertex(program, hull.choice[:, point])

    def bound(memory: float) -> float:
        if not exact:
            return hull.bound(memory + tolerance)
        i = int(np.searchsorted(found.memory, memory + tolerance, side="right"))
        return float(found.time[i - 1]) if i else math.inf

    return TrackedFrontier(found.memory, found.time, exact, (), unroll, bound)
