"""ZeRO stage 3: data parallelism with parameters, gradients and optimizer state sharded.

S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020,
section 5.3 (P_os+g+p); PyTorch's FSDP. Parameters are gathered before forward and again for backward,
gradients are reduce-scattered. Stages 1 and 2 (state without parameters) have no plan here: a parameter's
state and gradient live where the parameter lives. What is too small or too odd to shard stays whole.
"""

from __future__ import annotations

import numpy as np

from tensoropt.costs.tables import Variable
from tensoropt.planners.data_parallel import following_the_batch
from tensoropt.planners.problem import Problem, Selection, TableSpace
from tensoropt.planners.restricted import restricted_selections, some
from tensoropt.sharding.placement import Layout


def _sharded(homes: tuple[Layout, ...]) -> int:
    return sum(code >= 0 for home in homes for code in home[1:])


def sharded(space: TableSpace, variable: Variable, index: int) -> np.ndarray:
    """The options that shard the most parameters over the most axes."""
    if variable.kind == "parameter":
        most = max(_sharded((home,)) for home in variable.layouts)
        return np.array([_sharded((variable.layouts[index],)) == most])
    counts = np.array([_sharded(homes) for homes in variable.options[index]])
    return counts == counts.max()


def select(problem: Problem, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """ZeRO stage 3 at every micro-batch count, on the flat mesh."""
    allowed = following_the_batch(problem, sharded)
    return some(
        restricted_selections(problem, allowed, lambda space: len(space.names.mesh.shape) <= 1),
        "the batch divides by no number of devices here; choose a batch that does",
    )
