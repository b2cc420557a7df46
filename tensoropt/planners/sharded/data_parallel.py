"""Data parallelism: every device has the whole model and its share of the batch.

S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020;
A. Sergeev, M. Del Balso, *Horovod*, arXiv 1802.05799. Gradients are all-reduced in buckets once per step;
batch norm is synchronised, so that the result is that of one device.
"""

from __future__ import annotations

from tensoropt.planners.sharded.common.restricted import (
    NO_BATCH,
    at_least_one,
    following_the_batch,
    restricted_selections,
    whole,
)
from tensoropt.planners.task import PlanningTask, Selection


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return data parallelism at every micro-batch count (gradient accumulation), on the flat mesh."""
    allowed = following_the_batch(task, whole)
    return at_least_one(
        task,
        restricted_selections(task, allowed, lambda space: len(space.names.mesh.shape) <= 1),
        NO_BATCH,
    )
