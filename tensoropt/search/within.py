"""The search of a frontier exactly or within an allowed gap, in bounded time and memory if a gap is allowed.

Only strategies that are faster than the known ones by more than the gap matter. So everything is pruned by
the known staircase *lowered* by the gap: if no strategy is left below it, that is a proof.

1. Lines of the hull are bounds; their vertices and crossovers are the first known strategies (Lagrangian
bounds and reduced-cost fixing; Fisher, "The Lagrangian relaxation method", 1981). Classes of configurations
through which no strategy can come below the lowered staircase are left out. A smaller graph allows more
lines, which rule out further classes.
2. Passes that keep few points per table entry, pruned by a target if too much is left, find better
strategies.
3. A last pass over all that is left proves the gap. If that pass is too large, it is not made or abandoned.
The proven gap is then the hull's, and a note says so.

This is our method if no operator has to be fixed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import numpy as np

from tensoropt.frontier import Frontier, merge
from tensoropt.frontier.tools import Points
from tensoropt.search import shared
from tensoropt.search.bounds import Bound, Highest, Lowest, Staircase, looseness, lowered, pruning_target
from tensoropt.search.engine import MOST_SUMS, Messages, Pass, ProgramRunner, TooManySumsError, corners_of
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.program import Program, TableTooLargeError
from tensoropt.search.reduced_graph import ReducedGraph, restrict
from tensoropt.search.sources import Source, pass_source

_log = logging.getLogger(__name__)

# The effort spent on a gap. A number without a reason next to it is an assumption; none of them affects what
# a result claims.
_MOST_LINES = 256
"""The most lines of the hull, as long as more of them leave fewer classes."""
_WORTH_NARROWING = 0.9
"""The share of classes up to which the rest are left out: if more remain, narrowing is not worth a new
program."""
_FEW_PAIRS = 30_000
"""The pairs of table entries that a thinned pass examines without a target."""
_TARGETED_PAIRS = 20_000, 100_000, 800_000
"""The most pairs of table entries that each of the thinned passes examines, if more are left."""
_MOST_POINTS = 256, 2048, 1024, 1 << 15
"""The most points that a table entry keeps, in each of the thinned passes and in the last."""
_FAR = 0.01
"""The mean gap above which the third thinned pass is made: frontiers far above their hull need a wider
search."""
_LAST_PAIRS = 150_000
"""The pairs of table entries that the last pass examines; if more are left, it is not made."""
_SUMS = 15_000_000
"""The sums of points that one pass may make: about a quarter of a second. A pass that needs more is
abandoned, and tried once more with a closer target. In 17 searches of GPT-2 on 8 devices, the staircases lose
0.0005 % of their hypervolume on average, in logarithms, compared with passes of four times the sums."""
_THOROUGH = 4, 5, 20
"""The factors of a thorough search: for the sums that each pass may make, for the pairs that the last pass
may examine, and for the sums that the last pass may make."""
_WIDE = 10
"""The factor for the sums that the third thinned pass may make."""
_CLOSER = 4
"""The divisor of an abandoned pass's pairs: the next pass examines at most the quotient."""
_CLOSENESS = (0.75, 0.5, *(4.0**-n for n in range(1, 7)))
"""The distances of pruning targets above the hull, as shares of the known strategies' distance."""
_LARGE_WORK = 20_000_000
"""The pairs of table entries, over all steps, from which on only the first lines are made: 70 million pairs
(GPT-2 on a 2x2x8 mesh, 250 configurations per operator) take hours, and the strategies of the scalar problems
are within two per cent on average there."""
TOO_LARGE = (
    "too many configurations for a full search: each point's gap says how much faster a missing strategy "
    "could be; search meshes of fewer axes, or search on with epsilon=0"
)
_UNPROVEN = (
    "the search stopped before the allowed gap was proven everywhere: each point's gap says how much faster "
    "a missing strategy could be; epsilon=0 searches on"
)


class _Within:
    """The state of a search: the known strategies, and bounds on strategies whose classes were left out."""

    def __init__(self, settings: shared.SearchSettings) -> None:
        self.settings = settings
        self.sources: list[Source] = []
        self.left_out: list[tuple[Hull, Staircase]] = []

    @property
    def incumbents(self) -> Frontier:
        return self.settings.with_rivals(self.sources)

    @property
    def goal(self) -> Staircase:
        """The known strategies' staircase lowered by the gap; only strategies below it are worth finding."""
        return lowered(self.incumbents, self.settings.epsilon)

    def bound(self, inner: Bound) -> Bound:
        """Return a bound on all strategies; ``inner`` bounds those whose classes have not been left out."""
        for hull, floor in reversed(self.left_out):
            # Classes that were left out lie above the floor, and all strategies of that graph lie above its
            # hull.
            inner = Highest((hull, Lowest((floor, inner))))
        return inner

    def result(self, bound: Bound, *notes: str) -> shared.SearchResult:
        worst = shared.gaps(self.incumbents, bound)[1]
        remarks = notes if worst > self.settings.epsilon else ()
        return shared.SearchResult(tuple(self.sources), merge(self.sources), bound, worst == 0.0, remarks)

    def search(self, program: Program, order: Order) -> shared.SearchResult | None:
        search = HullSearch(program, self.settings.threads)
        lines, seeded = shared.FEW_LINES, 0
        while True:
            hull = search.find_hull(shared.lines_that_fit(program, lines))
            if hull is None and not self.left_out:
                return None
            if hull is None:
                # The remaining classes form no strategy: nothing lies below the floor by which they were
                # narrowed.
                return self.result(self.bound(Staircase(np.zeros(0), np.zeros(0))))
            # More lines of the same graph include its earlier vertices.
            self.sources = [*shared.seeds(program.reduced, hull), *self.sources[seeded:]]
            seeded, bound = 2, self.bound(hull)
            worst = shared.gaps(self.incumbents, bound)[1]
            if self.settings.epsilon > 0 and program.work > _LARGE_WORK and worst > 0:
                return shared.SearchResult(
                    tuple(self.sources), merge(self.sources), bound, False, (TOO_LARGE,)
                )
            if worst <= self.settings.epsilon:
                return self.result(bound)
            goal = self.goal
            classes = shared.useful_classes(program, search, hull, goal)
            if not all(mask.any() for mask in classes.values()):
                return self.result(self.bound(Highest((hull, goal))))
            left = sum(int(mask.sum()) for mask in classes.values())
            narrows = left <= _WORTH_NARROWING * sum(map(len, classes.values()))
            if narrows:
                self.left_out.append((hull, goal))
                reduced = restrict(program.reduced, classes)
                # With fewer classes another order may be cheaper, but it could also fix operators; the given
                # one fixes none and stays possible.
                reordered = greedy_order(reduced, 0.1)
                program = shared.build_program(reduced, order if reordered.fixed else reordered)
                search, seeded = HullSearch(program, self.settings.threads), 0
                search.repeat(hull)
            most = _MOST_LINES if narrows or self.left_out else shared.MORE_LINES
            if not narrows and (search.complete or lines >= most):
                return self._passes(program, search, hull)
            lines = min(2 * lines if narrows or self.left_out else shared.MORE_LINES, _MOST_LINES)

    def _passes(self, program: Program, search: HullSearch, hull: Hull) -> shared.SearchResult:
        inside, outside = search.messages()
        engine = ProgramRunner(program, self.settings.threads)
        bound = self.bound(hull)

        def below(goal: Points) -> Messages:
            corners = corners_of(hull, goal.memory, goal.time, shared.CORNERS)
            return Messages.of(inside, outside, corners, self.settings.threads)

        for number, points in enumerate(_MOST_POINTS):
            is_last = number == len(_MOST_POINTS) - 1
            goal = self.goal
            messages = below(goal)
            pairs = messages.pairs(program)
            if not pairs:
                return self.result(self.bound(Highest((hull, goal))))
            is_wide = number == len(_TARGETED_PAIRS) - 1
            if is_wide and (pairs <= _LAST_PAIRS or shared.gaps(self.incumbents, bound)[0] < _FAR):
                continue
            points, sums, last_pairs = self._limits(points, is_wide=is_wide, is_last=is_last)
            if is_last and pairs > last_pairs:
                break
            targeted = False
            if not is_last and pairs > _FEW_PAIRS:
                # A target must leave out at least half of the pairs to be worth a pass.
                closer = self._targeted(below, program, min(_TARGETED_PAIRS[number], pairs // 2))
                targeted = 2 * closer.pairs(program) <= pairs
                messages = closer if targeted else messages
            try:
                result = engine.run_pass(messages, points, sums)
            except TooManySumsError:
                if is_last:
                    break
                closer = self._targeted(below, program, messages.pairs(program) // _CLOSER)
                with contextlib.suppress(TooManySumsError, TableTooLargeError):
                    self._add(program, engine.run_pass(closer, points, sums))
                continue
            except TableTooLargeError as error:
                _log.warning("the frontier was not searched to the end: %s", error)
                return self.result(bound, f"the frontier was not searched to the end: {error}")
            self._add(program, result)
            # Everything below the goal has been found.
            if not (targeted or result.thinned):
                staircase = Staircase(self.incumbents.memory, self.incumbents.time)
                return self.result(self.bound(Highest((hull, Lowest((goal, staircase))))))
            if shared.gaps(self.incumbents, bound)[1] <= self.settings.epsilon:
                break
        return self.result(bound, *([_UNPROVEN] if self.settings.epsilon > 0 else ()))

    def _limits(self, points: int, *, is_wide: bool, is_last: bool) -> tuple[int, int, float]:
        """Return three limits on a search pass: the most points kept per table entry (0: no limit), the most
        additions of two points, and the most pairs of table entries up to which the last pass is made.

        Args:
            points: the most points per table entry; the setting ``max_points`` may lower this number.
            is_wide: whether the pass is the third thinned pass, which may make more additions.
        """
        most = self.settings.max_points
        if is_last and self.settings.epsilon == 0:
            return most or 0, MOST_SUMS, np.inf
        each, pairs, last = _THOROUGH if self.settings.thorough else (1, 1, 1)
        sums = _SUMS * (last if is_last else each * _WIDE if is_wide else each)
        return min(points, most or points), sums, _LAST_PAIRS * pairs

    def _add(self, program: Program, result: Pass) -> None:
        self.sources = [pass_source(program, result), *self.sources]

    def _targeted(self, below: Callable[[Points], Messages], program: Program, most: int) -> Messages:
        incumbents = self.incumbents
        loose = looseness(incumbents)
        # The closer a target, the fewer pairs are left below it: bisection gives the first of the shares that
        # is close enough.
        first, last, best = 0, len(_CLOSENESS) - 1, None
        while first < last:
            middle = (first + last) // 2
            messages = below(pruning_target(incumbents, _CLOSENESS[middle] * loose))
            if messages.pairs(program) <= most:
                last, best = middle, messages
            else:
                first = middle + 1
        return best if best is not None else below(pruning_target(incumbents, _CLOSENESS[first] * loose))


def track_auto(
    reduced: ReducedGraph, order: Order, settings: shared.SearchSettings
) -> shared.SearchResult | None:
    """Return the frontier of a graph whose ``order`` fixes no operator; None if no strategy is possible.

    Only strategies at most ``settings.epsilon`` faster are missing; a note says if that is not proven.
    """
    program = shared.build_program(reduced, order)
    # Bounds take a scalar pass per line, which does not pay off for small graphs.
    if shared.few_sums(program):
        with contextlib.suppress(TooManySumsError):
            return shared.unpruned(program, settings)
    return _Within(settings).search(program, order)
