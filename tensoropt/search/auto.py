"""Our method: bounds first, then frontiers pruned by them, then better bounds from better strategies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensoropt.frontier import Frontier, merge
from tensoropt.search.crossover import mix_neighbours
from tensoropt.search.engine import Engine, Messages
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.limits import corners_of, reachable_entries
from tensoropt.search.order import greedy_order
from tensoropt.search.problem import Problem, restrict
from tensoropt.search.program import Builder, Program
from tensoropt.search.scalar import flatten
from tensoropt.search.sources import MixSource, PassSource, Source, VertexSource

FEW_LINES, LINES = 8, 32
CORNERS = 2048
SCHEDULE = (16, 128, 1024)
SMALL = 20_000
TRACE: list[str] = []


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """Strategies, the frontier over all of them with origins, the bounds, and whether it is complete."""

    sources: tuple[Source, ...]
    frontier: Frontier
    hull: Hull
    exact: bool
    notes: tuple[str, ...]


def build_program(problem: Problem) -> Program:
    builder = Builder(problem)
    order, _ = greedy_order(problem, 0.1)
    for v in order:
        builder.eliminate(v)
    return builder.finish()


def explore_hull(program: Program, lines: int) -> tuple[HullSearch, Hull, list[Source]] | None:
    """Scalar problems only: lines, vertices, and the crossovers between neighbouring vertices."""
    search = HullSearch(program, flatten(program))
    hull = search.run(lines)
    if hull is None:
        return None
    problem = program.problem
    mixes = mix_neighbours(problem, hull.picks)
    return search, hull, [VertexSource(problem, hull), MixSource(problem, hull, mixes)]


def track_auto(problem: Problem, epsilon: float, max_points: int | None, threads: int | None) -> Found | None:
    """The frontier of ``problem``; None when no strategy is possible."""
    program = build_program(problem)
    sources: list[Source] = []
    if program.entries > SMALL:
        explored = explore_hull(program, FEW_LINES)
        if explored is None:
            return None
        search, hull, sources = explored
        program = build_program(_without_hopeless(program, search, hull, merge(sources)))
    explored = explore_hull(program, LINES)
    if explored is None:
        return None
    search, hull, more = explored
    sources += more
    inside, outside = search.messages()
    engine = Engine(program, threads)
    known = merge(sources)
    exact = False
    steps = [most for most in SCHEDULE if max_points is None or most < max_points] + [max_points or 0]
    for most in steps:
        result = engine.run(
            Messages(inside, outside, corners_of(hull, known.memory, known.time, CORNERS)), most
        )
        exact = not result.thinned
        latest = PassSource(program, result)
        sources = [latest] if exact else [latest, *sources]
        known = merge(sources)
        if TRACE:
            print("pass", most, result.points, len(known))
        if exact or (epsilon > 0 and worst_gap(known, hull) <= epsilon):
            break
    return Found(tuple(sources), known, hull, exact, ())


def _without_hopeless(program: Program, search: HullSearch, hull: Hull, known: Frontier) -> Problem:
    """Drop the classes through which no strategy can reach the frontier."""
    inside, outside = search.messages()
    corners = corners_of(hull, known.memory, known.time, CORNERS)
    kept = {}
    for leaf in set(program.problem.node_leaf):
        first = int(program.base[leaf])
        span = slice(first, first + int(program.sizes[leaf]))
        kept[leaf] = reachable_entries(inside[span], outside[span], corners.height, corners.slack)
    return restrict(program.problem, kept)


def worst_gap(known: Frontier, hull: Hull) -> float:
    """How much faster, at most, another strategy could be within any memory budget (relative)."""
    lower = np.array([hull.bound(m) for m in np.nextafter(known.memory[1:], 0)])
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.where(known.time[:-1] <= lower, 0.0, known.time[:-1] / lower - 1.0)
    last = hull.bound(float(known.memory[-1]))
    end = 0.0 if known.time[-1] <= last else float(known.time[-1]) / last - 1.0 if last > 0 else np.inf
    return max(float(gaps.max(initial=0.0)), end)
