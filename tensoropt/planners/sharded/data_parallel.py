"""Data parallelism: every device has the whole model and its share of the batch.

S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020; A.
Sergeev, M. Del Balso, *Horovod*, arXiv 1802.05799. Gradients are all-reduced in buckets once per step. Batch
norm is synchronised, so that the result is that of one device. PyTorch's ``DistributedDataParallel`` does not
synchronise it; :func:`local_statistics_s` simulates such a step.
"""

from __future__ import annotations

from tensoropt.costs.variables import Variable
from tensoropt.evaluation.evaluate import Evaluator
from tensoropt.ops.registry import spec_of
from tensoropt.plan.point import Point
from tensoropt.planners.sharded.common import restricted
from tensoropt.planners.tables import whole
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.simulate.candidates import overlap_of
from tensoropt.simulate.simulator import StepColumns


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return data-parallel strategies for every micro-batch count, on the mesh of one axis."""
    selections = restricted.on_the_batch(task, whole)
    return restricted.at_least_one(task, selections, restricted.NO_BATCH)


def local_statistics_s(task: PlanningTask, point: Point) -> float | None:
    """Return the duration in seconds of a data-parallel step without synchronised batch norms; None if the
    model has no batch norm that exchanges statistics.
    """
    space = task.spaces[point.space]
    names, tables = space.names, space.tables
    choice = dict(zip(names.variables, point.choice, strict=True))
    chosen = (*names.variables, *map(Variable.of_move, names.moves))
    overlap = overlap_of(task.cluster, space.mesh, beside=tables.prices.beside)
    (evaluation,) = Evaluator(tables, overlap)([(choice, dict(zip(chosen, point.options, strict=True)))])
    norms = {
        group.name
        for group in tables.graph.groups
        if any(spec_of(op.target).batch_statistics for op in group.operators)
    }
    columns, moments = StepColumns(evaluation.batch), evaluation.batch.schedule.moments
    # Issues with a kind are gradients and stay; the others inside a norm are batch statistics.
    statistics = [
        issue
        for issue in columns.issues
        if not issue.kind
        and moments[issue.position].kind == "inner"
        and moments[issue.position].group in norms
    ]
    columns.issues = [issue for issue in columns.issues if all(issue is not other for other in statistics)]
    return float(columns.metrics().time_s[0]) if statistics else None
