"""ZeRO: data parallelism with optimizer state sharded, then gradients, then parameters.

S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020,
section 5. Stage 1 (P_os) shards the state. Stage 2 (P_os+g) also shards gradients, reduce-scattered in every
micro-batch. Stage 3 (P_os+g+p, section 5.3; PyTorch's FSDP) also shards parameters, gathered before forward
and again for backward. In stages 1 and 2 parameters are gathered once per step and stay unsharded over it.
Parameters whose sizes do not allow sharding stay whole in all stages.

With one micro-batch, stage 1 sends as much as stage 2 and needs more memory, so it is tried only with two or
more (:func:`tensoropt.costs.restrictions.unsharded_options`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tensoropt.costs.cost_graph import VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.ops.layouts import Layout
from tensoropt.planners.sharded.common import restricted
from tensoropt.planners.tables import Scheme
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.sharding.storage import Reduce, Storage

STAGES = {1: Reduce.LAST_MICRO_BATCH, 2: Reduce.EACH_MICRO_BATCH, 3: None}
"""Stage -> how often the gradients of parameters that are gathered once per step are reduced; None:
parameters are gathered for each use."""


def sharded(layouts: Sequence[Layout]) -> int:
    """Return how many mesh axes shard each stored parameter, summed over all parameters."""
    return sum(code >= 0 for layout in layouts for code in layout[1:])


def reduction_times(layouts: Sequence[Layout]) -> set[Reduce]:
    """Return when gradients are reduced, among the parameters that are gathered once per step."""
    return {storage.reduce for storage in map(Storage.of, layouts) if storage.gathered_once}


def _stage_scheme(stage: int) -> Scheme:
    reduce = STAGES[stage]

    def allowed(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray:
        if variable.key.kind == "parameter":
            unsharded = [(layout,) for layout in variable.layouts]
            return _mask(unsharded, reduce)[[index]]
        return _mask(variable.options[index], reduce)

    return allowed


def _mask(options: Sequence[Sequence[Layout]], reduce: Reduce | None) -> np.ndarray:
    counts, times = np.array([*map(sharded, options)]), [*map(reduction_times, options)]
    # Stage 3 gathers for each use; parameters without an option gathered once are alike in every stage.
    wanted = {reduce} if reduce is not None and any(times) else set()
    # A parameter that cannot be sharded at all stays whole.
    mask: np.ndarray = (counts == counts.max()) & np.array([each == wanted for each in times])
    return mask


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return strategies of every ZeRO stage for every micro-batch count, on the mesh of one axis."""
    selections = (
        replace(selection, notes=(f"stage {stage}",), kind=f"stage {stage}")
        for stage in STAGES
        for selection in restricted.on_the_batch(task, _stage_scheme(stage))
    )
    return restricted.at_least_one(task, selections, restricted.NO_BATCH)
