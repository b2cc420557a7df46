"""ZeRO: data parallelism with optimizer state sharded, then gradients, then parameters.

S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020,
section 5: stage 1 (P_os) shards the state; stage 2 (P_os+g) gradients too, reduce-scattered in every
micro-batch; stage 3 (P_os+g+p, section 5.3; PyTorch's FSDP) parameters too, gathered before forward and again
for backward. In stages 1 and 2 the gathered parameters are held over the step, gathered once per step. What
is too small or too odd to shard stays whole in all of them.

With one micro-batch stage 1 sends what stage 2 sends and keeps more, so that it is tried from two on; nor is
it with mixed precision (:func:`tensoropt.costs.parameters.held_options`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tensoropt.costs.tables import Variable
from tensoropt.planners.problem import Problem, Selection, TableSpace
from tensoropt.planners.sharded.data_parallel import following_the_batch
from tensoropt.planners.sharded.restricted import Allowed, restricted_selections, some
from tensoropt.sharding.placement import HELD, WAITING, Layout

STAGES = {1: WAITING, 2: HELD, 3: None}
"""Per stage what the layouts of sharded parameters say of their gathered copies."""

Homes = tuple[Layout, ...]


def _sharded(homes: Homes) -> int:
    return sum(code >= 0 for home in homes for code in home[1:])


def _held(homes: Homes) -> set[int]:
    return {home[0] for home in homes if home[0] in (HELD, WAITING)}


def of_stage(stage: int) -> Allowed:
    """Allows the options that shard the most over the most axes in this stage."""
    code = STAGES[stage]

    def allowed(space: TableSpace, variable: Variable, index: int) -> np.ndarray:
        if variable.kind == "parameter":
            others = [(home,) for home in variable.layouts]
            return _mask(others, code)[[index]]
        return _mask(variable.options[index], code)

    return allowed


def _mask(options: Sequence[Homes], code: int | None) -> np.ndarray:
    counts = np.array([_sharded(homes) for homes in options])
    most = counts == counts.max()
    if code is None or not any(_held(homes) for homes in options):  # else there is nothing to hold
        return most & np.array([not _held(homes) for homes in options])
    mask: np.ndarray = most & np.array([_held(homes) == {code} for homes in options])
    return mask


def select(problem: Problem, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Every stage at every micro-batch count, on the flat mesh."""
    return some(
        _of_all_stages(problem),
        "the batch divides by no number of devices here; choose a batch that does",
    )


def _of_all_stages(problem: Problem) -> Iterator[Selection]:
    for stage in STAGES:
        allowed = following_the_batch(problem, of_stage(stage))
        for selection in restricted_selections(problem, allowed, _is_flat):
            yield replace(selection, notes=(f"stage {stage}",))


def _is_flat(space: TableSpace) -> bool:
    return len(space.names.mesh.shape) <= 1
