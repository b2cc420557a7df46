"""DAPPLE: data parallelism and stages, planned for the latency of a whole step.

S. Fan et al., *DAPPLE: A Pipelined Data Parallel Approach for Training Large Models*, PPoPP 2021, section
4.3. A step consists of a warm-up, a steady and an ending phase, in which a stage's replicas reduce gradients.
A dynamic programme finds the partition and the degree that minimise it. Backward begins early (1F1B). Here
every stage has the same number of replicas, and every degree is tried.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensoropt.planners.pipelined.common.task import PipelinedAnswer, PipelineTask, data_parallel, flat


def pipelines(task: PipelineTask, memory_limit_bytes: float | None, seed: int) -> Iterator[PipelinedAnswer]:
    """Yield pipelines of every number of device groups, on the frontier of memory and time."""
    for mesh, micro_batches in task.suiting(flat):
        positions = [task.positions(mesh.shape[0])] * (mesh.shape[0] - 1)
        yield from task.compose(mesh, micro_batches, data_parallel(), positions)
