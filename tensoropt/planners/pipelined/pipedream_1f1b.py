"""PipeDream with flushes: the slowest stage is as fast as possible; forwards and backwards alternate.

D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019, section 3.1:
the partitioning of layers into stages that minimises the time of the slowest; *Memory-Efficient
Pipeline-Parallel DNN Training*, ICML 2021, section 3.2: 1F1B with a flush after each batch, so that one
version of the weights is kept. Here every stage has the same number of replicas (PipeDream's may differ);
every degree is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensoropt.pipeline.compose import Composition, Offer, compose
from tensoropt.pipeline.composer import Cut
from tensoropt.planners.pipelined.common.data_parallel import data_parallel, flat
from tensoropt.planners.pipelined.common.task import PipelinedAnswer, PipelineTask


def pipelines(task: PipelineTask, memory_limit_bytes: float | None, seed: int) -> Iterator[PipelinedAnswer]:
    """Yield a pipeline of every degree, with the remaining devices as replicas of stages."""
    for mesh, micro_batches in task.suiting(flat):
        positions = [task.positions(mesh.shape[0])] * (mesh.shape[0] - 1)
        yield from task.compose(
            mesh, micro_batches, data_parallel(), positions, composing=_slowest_stage_fastest
        )


def _slowest_stage_fastest(
    offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int
) -> Iterator[Composition[Cut]]:
    """Yield the compositions whose slowest stage takes the least time, for every amount of memory (SOSP 2019,
    section 3.1)."""
    slowest_only = [
        {
            ends: replace(offer, first_s=np.zeros_like(offer.first_s), end_s=np.zeros_like(offer.end_s))
            for ends, offer in of_stage.items()
        }
        for of_stage in offers
    ]
    yield from compose(slowest_only, max(micro_batches, 2), step=0.01)
