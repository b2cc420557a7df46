"""Our method: bounds first, then frontiers pruned by them, then better bounds from better strategies."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tensoropt.frontier import Frontier, merge
from tensoropt.frontier.tools import Points
from tensoropt.search.crossover import mix_neighbours
from tensoropt.search.engine import Engine, Messages
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.limits import corners_of, reachable_entries
from tensoropt.search.memory import TableTooLargeError
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.problem import Problem, restrict
from tensoropt.search.program import Builder, Program
from tensoropt.search.pruning_target import aim, looseness
from tensoropt.search.scalar import flatten
from tensoropt.search.sources import MixSource, PassSource, Source, VertexSource

log = logging.getLogger(__name__)

FEW_SUMS = 300_000
FEW_LINES, LINES = 16, 32
CORNERS = 2048
COARSE_POINTS = 256
TIGHT = 0.01
WORTH_NARROWING = 20_000
MORE_LINES = 96
FEW_PAIRS = 20_000
MANY_PAIRS = 400_000
LARGE_PASS = 20_000_000
CLOSENESS = 0.25, 0.0625, 0.0039, 0.00024
MESSAGE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """What the caller asked for: allowed gap, points per table entry, threads.

    ``rivals``: points of other graphs; what they beat need not be found.
    """

    epsilon: float = 0.0
    max_points: int | None = None
    threads: int | None = None
    rivals: Points | None = None

    def with_rivals(self, sources: list[Source]) -> Frontier:
        """The frontier over ``sources`` and the rivals."""
        return merge([*sources, *([] if self.rivals is None else [self.rivals])])

    def after(self, sources: list[Source]) -> Settings:
        """The settings of a search that need not find what ``sources`` beat."""
        return replace(self, rivals=self.with_rivals(sources)) if sources else self


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """Strategies, the frontier over all of them with origins, the bounds, and whether it is complete.

    ``hull`` is None only where the frontier is exact and is its own bound.
    """

    sources: tuple[Source, ...]
    frontier: Frontier
    hull: Hull | None
    exact: bool
    notes: tuple[str, ...] = ()


def build_program(problem: Problem, order: Order) -> Program:
    """Remove the operators of ``order`` one after the other."""
    builder = Builder(problem)
    for v in order.removed:
        builder.eliminate(v)
    return builder.finish()


def lines_that_fit(program: Program, wanted: int) -> int:
    """How many lines the messages of a program may have within their share of memory."""
    return max(4, min(wanted, MESSAGE_BYTES // (16 * max(program.entries, 1))))


def seeds(problem: Problem, hull: Hull) -> list[Source]:
    """Strategies that the scalar problems give at once: hull vertices and the mixes between them."""
    return [VertexSource(problem, hull), MixSource(problem, hull, mix_neighbours(problem, hull.picks))]


def hopeful(
    program: Program, search: HullSearch, hull: Hull, known: Frontier
) -> dict[int, NDArray[np.bool_]]:
    """Per operator, the classes through which some strategy can still reach the frontier."""
    inside, outside = search.messages()
    corners = corners_of(hull, known.memory, known.time, CORNERS)
    roof, of_leaf = corners.roof, {}
    for leaf in set(program.problem.node_leaf):
        first = int(program.base[leaf])
        span = slice(first, first + int(program.sizes[leaf]))
        of_leaf[leaf] = reachable_entries(inside[span], outside[span], corners.height, roof)
    return {v: of_leaf[leaf] for v, leaf in enumerate(program.problem.node_leaf)}


def track_auto(problem: Problem, order: Order, settings: Settings) -> Found | None:
    """The frontier of a problem whose ``order`` fixes nothing; None when no strategy is possible."""
    program = build_program(problem, order)
    if _sums(program) <= FEW_SUMS:
        return _unpruned(program, settings)
    sources: list[Source] = []
    if program.entries > WORTH_NARROWING:
        search = HullSearch(program, flatten(program))
        hull = search.run(lines_that_fit(program, FEW_LINES))
        if hull is None:
            return None
        sources = seeds(problem, hull)
        classes = hopeful(program, search, hull, settings.with_rivals(sources))
        if not all(mask.any() for mask in classes.values()):  # the rivals beat everything here
            return Found(tuple(sources), merge(sources), hull, True)
        mean, worst = gaps(settings.with_rivals(sources), hull)
        if worst <= settings.epsilon and mean <= settings.epsilon / 10:
            return Found(tuple(sources), merge(sources), hull, worst == 0.0)
        problem = restrict(problem, classes)
        log.debug("%d entries before narrowing", program.entries)
        again = greedy_order(problem, 0.1)
        program = build_program(problem, order if again.fixed else again)
    search = HullSearch(program, flatten(program))
    hull = search.run(lines_that_fit(program, LINES))
    if hull is None:
        return None
    log.debug("%d entries, %d lines", program.entries, len(hull.value))
    sources += seeds(problem, hull)
    return _passes(program, search, hull, sources, settings)


def _sums(program: Program) -> int:
    """Roughly how many sums a pass without pruning makes: tables fill up along the way."""
    leaves = program.problem.leaves
    options = np.concatenate([np.diff(leaf.offsets) for leaf in leaves])
    mean = max(float(options.mean()), 1.0)
    return int(program.work * len(program.problem.domains) * mean + int(options.max()) ** 2)


def _unpruned(program: Program, settings: Settings) -> Found | None:
    """The frontier of a small problem, cheaper to compute than bounds to prune it by."""
    latest = PassSource(program, Engine(program, settings.threads).run(None, 0))
    if not len(latest.memory):
        return None
    return Found((latest,), merge([latest]), None, True)


def _passes(
    program: Program, search: HullSearch, hull: Hull, sources: list[Source], settings: Settings
) -> Found:
    """Passes pruned by all strategies known before them, until exact or good enough."""
    inside, outside = search.messages()
    engine = Engine(program, settings.threads)
    known = settings.with_rivals(sources)

    def below(goal: Points) -> Messages:
        return Messages.of(inside, outside, corners_of(hull, goal.memory, goal.time, CORNERS))

    if not search.complete and below(known).pairs(program) > MANY_PAIRS:
        more = search.run(lines_that_fit(program, MORE_LINES))
        assert more is not None, "the hull had lines before"
        hull = more
        inside, outside = search.messages()
        sources = [*seeds(program.problem, hull), *sources]
        known = settings.with_rivals(sources)
    log.debug("seeds leave a gap of %.2g in the mean, %.2g at worst", *gaps(known, hull))
    notes: tuple[str, ...] = ()
    for points in _sizes(settings):
        if gaps(known, hull)[1] <= settings.epsilon:
            break
        messages, aimed = below(known), False
        if points != (settings.max_points or 0):
            pairs = messages.pairs(program)
            if pairs <= FEW_PAIRS:
                continue
            hoped, most = messages, pairs // 2
            for share in CLOSENESS:  # as far above the hull as can be afforded
                hoped = below(aim(known, share * looseness(known)))
                if hoped.pairs(program) <= min(most, MANY_PAIRS):
                    break
            aimed = hoped.pairs(program) <= most
            if aimed:
                messages = hoped
            elif settings.epsilon == 0 and gaps(known, hull)[0] <= TIGHT:
                continue  # known strategies are tight enough to prune by
        if settings.epsilon > 0 and messages.pairs(program) > LARGE_PASS:
            left = messages.pairs(program)
            notes = (
                f"not every strategy was ruled out ({left:.2g} pairs of table entries were left to look at): "
                "the gap says how much faster a missing one could be; epsilon=0 searches on",
            )
            break
        log.debug("%d pairs of entries to look at", messages.pairs(program))
        try:
            result = engine.run(messages, points)
        except TableTooLargeError as error:
            note = f"not searched to the end: {error}"
            log.warning(note)
            return Found(tuple(sources), merge(sources), hull, False, (note,))
        latest = PassSource(program, result)
        found = f"{result.points} points, {len(latest.time)} at the root"
        log.debug("%s pass, %d points per entry: %s", "aimed" if aimed else "plain", points, found)
        if not (aimed or result.thinned):
            return Found((latest,), merge([latest]), hull, True)
        sources = [latest, *sources]
        known = settings.with_rivals(sources)
    worst = gaps(known, hull)[1]
    notes = notes if worst > settings.epsilon else ()
    return Found(tuple(sources), merge(sources), hull, worst == 0.0, notes)


def _sizes(settings: Settings) -> list[int]:
    """Points per table entry of the passes to come, 0 for all: a small pass often closes a gap."""
    coarse = (64, COARSE_POINTS) if settings.epsilon > 0 else (COARSE_POINTS,)
    most = settings.max_points
    return [*(points for points in coarse if most is None or points < most), most or 0]


def gaps(known: Frontier, hull: Hull) -> tuple[float, float]:
    """(mean, worst) over budgets: how much faster, at most, another strategy could be (relative).

    A worst gap of 0 proves that nothing is missing: whatever fits a budget is no faster than what is known.
    """
    if hull.weight_m[0] * known.memory[0] > hull.value[0]:
        return np.inf, np.inf  # something leaner may exist
    budgets = np.append(np.nextafter(known.memory[1:], 0), np.inf)
    lower = hull.bounds(budgets)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(known.time <= lower, 0.0, known.time / lower - 1.0)
    return float(found.mean()), float(found.max(initial=0.0))
