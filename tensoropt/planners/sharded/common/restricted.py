"""Methods that are a part of the search space: what they leave open is decided exactly.

A published scheme fixes what operators split; where tensors are materialised and kept is left to the frontier
of what remains, so that no scheme looks worse than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.tables import Scheme, TableSpace
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.search import NoStrategyError, TrackedFrontier, track_frontier

MOST_POINTS = 64
"""Points kept per space; an assumption: a scheme leaves little open, so more would hardly differ."""


def restricted_selections(
    task: PlanningTask, allowed: Scheme, suits: Callable[[TableSpace], bool] = lambda _: True
) -> Iterator[Selection]:
    """Yield the frontiers of what is allowed, over all spaces that suit; spaces without any strategy yield
    none."""
    for number, space in enumerate(task.spaces):
        if not suits(space):
            continue
        graph = space.tables.restricted(partial(allowed, space.tables))
        try:
            # A gap of a thousandth is allowed: what a scheme leaves open does not deserve an exact search.
            frontier = track_frontier(graph, epsilon=1e-3, max_points=MOST_POINTS)
        except NoStrategyError:  # nothing is possible there, for instance because sizes do not divide
            continue
        yield from selections_of(number, frontier)


def selections_of(number: int, frontier: TrackedFrontier) -> Iterator[Selection]:
    """Yield the strategies of a frontier of space ``number``, ascending in memory."""
    for i in range(len(frontier)):
        yield Selection(number, frontier.strategy(i), frontier.options(i))


def some(selections: Iterator[Selection], why_not: str) -> list[Selection]:
    """Return the selections as a list.

    Raises:
        UnsuitableError: there are none.
    """
    found = list(selections)
    if not found:
        raise UnsuitableError(why_not)
    return found
