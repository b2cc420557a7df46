"""Strategies in which everything follows the batch: the base of data parallelism, ZeRO and Megatron."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.tables import Scheme
from tensoropt.planners.task import PlanningTask
from tensoropt.sharding.configurations import MicroBatchRefused, batch_strategies


def batch_labels(task: PlanningTask) -> Mapping[str, str]:
    """Return what each group splits when the batch is split.

    Raises:
        UnsuitableError: an operator mixes samples.
    """
    try:
        found = batch_strategies(task.prepared.graph)
    except MicroBatchRefused as refusal:
        raise UnsuitableError(f"the batch of this model cannot be split: {refusal}") from None
    return {name: str(strategy.label) for name, strategy in found.items()}


def following_the_batch(task: PlanningTask, stored: Scheme) -> Scheme:
    """Allow every axis of every group on its batch dim, with nothing recomputed; ``stored`` decides about
    options."""
    labels = batch_labels(task)

    def allowed(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray | None:
        if variable.again and variable.again[index]:
            return NO_OPTION
        if variable.key.kind != "group":
            return stored(tables, variable, index) if variable.key.kind == "parameter" else None
        if any(label != labels[variable.key] for label in tables.labels(variable.key, index)):
            return NO_OPTION
        return stored(tables, variable, index)

    return allowed


def whole(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray:
    """Return the options that shard no parameter: the first is as the parameters are used."""
    # Codes from the second on: the first is the micro-batch axis, on which nothing is sharded.
    if variable.key.kind == "parameter":
        return np.array([all(code < 0 for code in variable.layouts[index][1:])])
    return np.arange(len(variable.memory[index])) == 0
