"""OptCNN: the fastest strategy, by node and edge elimination.

Z. Jia, S. Lin, C. R. Qi, A. Aiken, ICML 2018 (equations 1 to 3, algorithm 1). One objective, time; memory is
no part of it, so a limit can only refuse the result. A configuration's options count with their fastest. The
paper's networks reduce to two nodes; where more remain, the notes say how many.
"""

from __future__ import annotations

import numpy as np

from tensoropt.costs.tables import CostTables
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.sharded.common.elimination import Cheapest, IrreducibleError, cheapest
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.types import Floats


def fastest(tables: CostTables) -> tuple[Cheapest, dict[str, int]]:
    """Return the fastest strategy of the tables, and its options.

    Raises:
        IrreducibleError: elimination leaves more than can be enumerated.
    """
    nodes: dict[str, Floats] = {
        v.key: np.array([table[:, 1].min() for table in v.costs]) for v in tables.variables
    }
    edges = [(e.a, e.b, e.table[:, :, 1][np.ix_(e.rows, e.cols)]) for e in tables.edges]
    solution = cheapest(nodes, edges)
    options: dict[str, int] = {
        v.key: int(v.costs[solution.choice[v.key]][:, 1].argmin()) for v in tables.variables
    }
    return solution, options


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return the fastest strategy of every mesh and micro-batch count.

    Raises:
        UnsuitableError: the graph cannot be reduced far enough.
    """
    selections = []
    for number, space in enumerate(task.spaces):
        try:
            best, options = fastest(space.tables)
        except IrreducibleError as error:
            names = ", ".join(error.remaining[:3])
            raise UnsuitableError(
                "optcnn enumerates what node and edge elimination leave, two nodes of the paper's "
                f"networks; this model leaves {len(error.remaining)} entangled ones ({names}, ...), which "
                "have too many strategies; use the frontier or ilp"
            ) from None
        left = len(best.final)
        notes = (f"node and edge elimination leave {left} nodes, which were enumerated",) if left else ()
        selections.append(Selection(number, best.choice, options, notes))
    return selections
