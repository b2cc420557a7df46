"""OptCNN: the fastest strategy, by node and edge elimination.

Z. Jia, S. Lin, C. R. Qi, A. Aiken, ICML 2018 (equations 1 to 3, algorithm 1). Time is the only objective, so
a memory limit can only refuse the result. Parameters are stored in the layout that is fastest. The paper
enumerates the nodes that node and edge elimination leave, which have more than two neighbours; here they are
eliminated.
"""

from __future__ import annotations

import numpy as np

from tensoropt.costs.tables import CostTables
from tensoropt.planners.sharded.common.cheapest import cheapest
from tensoropt.planners.task import PlanningTask, Selection


def fastest(tables: CostTables) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """Return the configurations and options of the fastest strategy, and a note if it is not proven."""
    nodes = {v.key: np.array([table[:, 1].min() for table in v.costs]) for v in tables.variables}
    edges = [(e.a, e.b, e.table[:, :, 1][np.ix_(e.rows, e.cols)]) for e in tables.edges]
    choice, notes = cheapest(nodes, edges)
    return choice, {v.key: int(v.costs[choice[v.key]][:, 1].argmin()) for v in tables.variables}, notes


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return the fastest strategy of every mesh and micro-batch count."""
    return [Selection(number, *fastest(space.tables)) for number, space in enumerate(task.spaces)]
