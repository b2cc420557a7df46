"""Data parallelism: every device has the whole model and its share of the batch.

S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020;
A. Sergeev, M. Del Balso, *Horovod*, arXiv 1802.05799. Gradients are all-reduced in buckets once per step;
batch norm is synchronised, so that the result is that of one device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensoropt.costs.tables import Variable
from tensoropt.planners.problem import Problem, Selection, TableSpace, labels_of
from tensoropt.planners.registry import UnsuitableError
from tensoropt.planners.sharded.restricted import NOTHING, Allowed, restricted_selections, some
from tensoropt.sharding.configurations import MicroBatchRefused, batch_strategies


def batch_labels(problem: Problem) -> Mapping[str, str]:
    """Per group what it splits when the batch is split.

    Raises:
        UnsuitableError: an operator mixes samples.
    """
    try:
        found = batch_strategies(problem.prepared.graph)
    except MicroBatchRefused as refusal:
        raise UnsuitableError(f"the batch of this model cannot be split: {refusal}") from None
    return {name: strategy.label for name, strategy in found.items()}


def following_the_batch(problem: Problem, stored: Allowed) -> Allowed:
    """Every axis of every group on its batch dim, nothing recomputed; ``stored`` decides about options."""
    labels = batch_labels(problem)

    def allowed(space: TableSpace, variable: Variable, index: int) -> np.ndarray | None:
        if variable.again and variable.again[index]:
            return NOTHING
        if variable.kind != "group":
            return stored(space, variable, index) if variable.kind == "parameter" else None
        if any(label != labels[variable.name] for label in labels_of(space, variable.name, index)):
            return NOTHING
        return stored(space, variable, index)

    return allowed


def whole(space: TableSpace, variable: Variable, index: int) -> np.ndarray:
    """Options that shard no parameter: the first is as the parameters are used."""
    if variable.kind == "parameter":
        return np.array([all(code < 0 for code in variable.layouts[index][1:])])
    return np.arange(len(variable.memory[index])) == 0


def select(problem: Problem, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Data parallelism at every micro-batch count (gradient accumulation), on the flat mesh."""
    allowed = following_the_batch(problem, whole)
    return some(
        restricted_selections(problem, allowed, lambda space: len(space.names.mesh.shape) <= 1),
        "the batch divides by no number of devices here; choose a batch that does",
    )
