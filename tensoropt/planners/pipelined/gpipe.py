"""GPipe: a stage on each device, all micro-batches forward, then backward, with blocks recomputed.

Y. Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, NeurIPS
2019. There are as many stages ("cells") as devices, cut so that their estimated costs differ least (section
2.2; here: so that the heaviest is lightest). Only the inputs of a stage's blocks are saved for backward
(section 2.3). All forwards run before all backwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensoropt.pipeline.stages import balanced
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pipelined.common.task import PipelinedAnswer, PipelineTask, data_parallel


def pipelines(task: PipelineTask, memory_limit_bytes: float | None, seed: int) -> Iterator[PipelinedAnswer]:
    """Yield one pipeline, with a stage on each device.

    Raises:
        UnsuitableError: the model has too few positions for cuts, or the batch too few samples.
    """
    for mesh, micro_batches in task.suiting(lambda mesh: len(mesh.shape) == 1):
        stages = mesh.shape[0]
        cuts = balanced(task.flops, task.positions(stages), stages)
        if not cuts:
            raise UnsuitableError(f"the model has too few positions for {stages} stages; use fewer devices")
        allowed, positions = data_parallel(recomputing=True), [[cut] for cut in cuts]
        yield from task.compose(mesh, micro_batches, allowed, positions, schedule="gpipe")
