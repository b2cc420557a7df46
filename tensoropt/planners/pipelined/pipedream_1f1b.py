"""PipeDream with flushes: the slowest stage is as fast as possible; forwards and backwards alternate.

D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019, section 3.1:
layers are divided into stages so that the slowest stage takes the least time. *Memory-Efficient
Pipeline-Parallel DNN Training*, ICML 2021, section 3.2: 1F1B with a flush after each batch, so that only one
version of the weights is needed. Here every stage has the same number of replicas (PipeDream's may differ),
and every degree is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tensoropt.pipeline.compose import Offer
from tensoropt.planners.pipelined.common.task import PipelinedAnswer, PipelineTask, as_if, data_parallel, flat


def pipelines(task: PipelineTask, memory_limit_bytes: float | None, seed: int) -> Iterator[PipelinedAnswer]:
    """Yield pipelines of every possible number of stages. All stages of a pipeline have the same number of
    devices, and each device has a replica of its stage (data parallelism)."""
    for mesh, micro_batches in task.suiting(flat):
        positions = [task.positions(mesh.shape[0])] * (mesh.shape[0] - 1)
        composing = as_if(_when_slowest)
        yield from task.compose(mesh, micro_batches, data_parallel(), positions, composing=composing)


def _when_slowest(offer: Offer) -> Offer:
    """Return a stage's strategies at no cost but their time as the slowest stage (SOSP 2019, section 3.1)."""
    return replace(offer, first_s=np.zeros_like(offer.first_s), end_s=np.zeros_like(offer.end_s))
