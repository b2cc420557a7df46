"""Alpa: stages by a dynamic programme, and any way to split operators inside a stage.

L. Zheng et al., *Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning*, OSDI
2022. Operators are clustered into layers of about equal FLOP, of which stages are formed (section 5.2,
"operator clustering"). A stage's devices split its operators in any way, for the shortest time within the
memory that 1F1B leaves it (section 4.2, equation 5). The step takes :math:`\\sum_i t_i + (B - 1) \\max_j t_j`
(equation 2), without what follows the last micro-batch. Here all stages have equal meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.pipeline.compose import Offer
from tensoropt.pipeline.composer import Crossings
from tensoropt.pipeline.stages import balanced
from tensoropt.planners.pipelined.common.task import PipelinedAnswer, PipelineTask, as_if, flat
from tensoropt.planners.tables import computed_otherwise

_LAYERS = 16
"""The most layers into which operators are clustered, as in the paper's examples (appendix)."""


def pipelines(task: PipelineTask, memory_limit_bytes: float | None, seed: int) -> Iterator[PipelinedAnswer]:
    """Yield pipelines of every number of device groups, on the frontier of memory and time."""
    for mesh, micro_batches in task.suiting(flat):
        stages = mesh.shape[0]
        where = task.positions(stages)
        layers = list(balanced(task.flops, where, max(min(_LAYERS, len(where) + 1), stages)))
        crossings, composing = Crossings(everywhere_alike=True), as_if(_without_end)
        yield from task.compose(
            mesh, micro_batches, _kept, [layers] * (stages - 1), crossings=crossings, composing=composing
        )


def _kept(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray | None:
    return NO_OPTION if computed_otherwise(tables, variable, index, recomputing=False) else None


def _without_end(offer: Offer) -> Offer:
    """Return a stage's strategies without the time after the last micro-batch, as in equation 2."""
    return replace(offer, end_s=np.zeros_like(offer.end_s))
