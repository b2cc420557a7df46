"""track_frontier: cost graph -> frontier."""

from __future__ import annotations

import math

import numpy as np

from tensoropt.search.auto import Found, track_auto
from tensoropt.search.costgraph import CostGraph
from tensoropt.search.problem import Problem, build_problem
from tensoropt.search.result import Choice, TrackedFrontier

METHODS = ("auto", "ldp", "elimination")


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
    found = track_auto(problem, epsilon, max_points, threads)
    if found is None:
        raise ValueError("no strategy is possible: every combination meets an inf entry; loosen a table")
    return _result(problem, found)


def _result(problem: Problem, found: Found) -> TrackedFrontier:
    frontier, tolerance = found.frontier, problem.memory_tolerance

    def unroll(index: int) -> Choice:
        which, point = frontier.origin[index].tolist()
        return found.sources[which].rebuild(point)

    def bound(memory: float) -> float:
        if not found.exact:
            return found.hull.bound(memory + tolerance)
        i = int(np.searchsorted(frontier.memory, memory + tolerance, side="right"))
        return float(frontier.time[i - 1]) if i else math.inf

    return TrackedFrontier(frontier.memory, frontier.time, found.exact, found.notes, unroll, bound)
