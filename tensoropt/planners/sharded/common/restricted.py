"""Methods that are a part of the space: what they leave open is decided exactly.

A published scheme fixes what operators split; where tensors are materialised and kept is left to the
frontier of what remains, so that no scheme looks worse than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tensoropt.costs.tables import VariableTable
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.task import PlanningTask, Selection, TableSpace
from tensoropt.search import CostGraph, NoStrategyError, TrackedFrontier, track_frontier

Allowed = Callable[[TableSpace, VariableTable, int], np.ndarray | None]
"""(space, variable, configuration) -> mask over its options, or None for all of them."""

MOST_POINTS = 64
"""Points kept per space; an assumption: a scheme leaves little open, so that more would hardly differ."""


def restricted_graph(space: TableSpace, allowed: Allowed) -> CostGraph:
    """The space's cost graph with everything else marked impossible.

    Where nothing of a variable is allowed the graph says so when it is searched
    (:class:`~tensoropt.search.NoStrategyError`).

    Raises:
        ValueError: a table is no table of costs (negative, NaN, ragged), or a mask does not fit its table.
    """
    graph = CostGraph()
    for variable in space.tables.variables:
        costs = []
        for index, table in enumerate(variable.costs):
            mask = allowed(space, variable, index)
            costs.append(table if mask is None else np.where(mask[:, None], table, np.inf))
        graph.add_operator(variable.key, costs)
    for edge in space.tables.edges:
        graph.add_edge(edge.a, edge.b, edge.table, rows=edge.rows, cols=edge.cols)
    return graph


def restricted_selections(
    task: PlanningTask, allowed: Allowed, suits: Callable[[TableSpace], bool] = lambda _: True
) -> Iterator[Selection]:
    """The frontiers of what is allowed, over all spaces that suit; spaces without any strategy give none."""
    for number, space in enumerate(task.spaces):
        if not suits(space):
            continue
        graph = restricted_graph(space, allowed)
        try:
            # A gap of a thousandth is allowed: what a scheme leaves open is worth no exact search.
            frontier = track_frontier(graph, epsilon=1e-3, max_points=MOST_POINTS)
        except NoStrategyError:  # nothing is possible there, for instance because sizes do not divide
            continue
        yield from selections_of(number, frontier)


def selections_of(number: int, frontier: TrackedFrontier) -> Iterator[Selection]:
    """The strategies of a frontier of space ``number``, ascending in memory."""
    for i in range(len(frontier)):
        yield Selection(number, frontier.strategy(i), frontier.options(i))


def some(selections: Iterator[Selection], why_not: str) -> list[Selection]:
    """The selections as a list.

    Raises:
        UnsuitableError: there are none.
    """
    found = list(selections)
    if not found:
        raise UnsuitableError(why_not)
    return found


NOTHING = np.zeros(1, dtype=bool)
"""A mask that allows no option."""
