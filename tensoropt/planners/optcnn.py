"""OptCNN: the fastest strategy, by node and edge elimination.

Z. Jia, S. Lin, C. R. Qi, A. Aiken, ICML 2018 (equations 1 to 3, algorithm 1). One objective, time; memory is
no part of it, so a limit can only refuse the result. A configuration's options count with their fastest.
"""

from __future__ import annotations

import numpy as np

from tensoropt.costs.tables import CostTables
from tensoropt.planners.elimination import IrreducibleError, cheapest
from tensoropt.planners.problem import Problem, Selection
from tensoropt.planners.registry import UnsuitableError


def fastest(tables: CostTables) -> tuple[float, dict[str, int], dict[str, int]]:
    """(seconds, choice, options) of the fastest strategy of the tables.

    Raises:
        IrreducibleError: elimination leaves more than two nodes.
    """
    nodes = {v.name: np.array([table[:, 1].min() for table in v.costs]) for v in tables.variables}
    edges = [(e.a, e.b, e.table[:, :, 1][np.ix_(e.rows, e.cols)]) for e in tables.edges]
    seconds, choice = cheapest(nodes, edges)
    options = {v.name: int(v.costs[choice[v.name]][:, 1].argmin()) for v in tables.variables}
    return seconds, choice, options


def select(problem: Problem, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """The fastest strategy of every mesh and micro-batch count.

    Raises:
        UnsuitableError: the graph is not reducible.
    """
    found = []
    for number, space in enumerate(problem.spaces):
        try:
            _, choice, options = fastest(space.tables)
        except IrreducibleError as error:
            names = ", ".join(error.remaining[:3])
            raise UnsuitableError(
                f"optcnn reduces the graph by node and edge elimination until two nodes remain, but "
                f"{len(error.remaining)} are left ({names}, ...); use the frontier or ilp"
            ) from None
        found.append(Selection(number, choice, options))
    return found
