"""Convert a launcher's job to a pinned configuration."""

from __future__ import annotations

from tensoropt.launchers.job import NOTHING, LaunchedJob
from tensoropt.planners.pinned import PinnedConfiguration


def pinned_of(job: LaunchedJob, devices: int, batch: int) -> PinnedConfiguration:
    """Return the pinned configuration that runs a job on ``devices`` devices with a global ``batch``.

    Raises:
        JobError: the job's degrees need another device count, or its micro-batches do not divide the batch.
        UnsuitableError: a degree is not supported.
    """
    job = job.on(devices)
    return PinnedConfiguration(
        data=job.data or 1,
        tensor=job.tensor,
        context=job.context,
        ring=job.ring,
        stage=job.stage,
        shard_group=job.shard_group if job.stage else None,
        root_once=job.root_once,
        sequence_parallel=job.sequence_parallel,
        micro_batches=job.micro_batches_of(batch),
        recompute=False if job.recompute == NOTHING else job.recompute,
        every=job.every,
        first=job.first,
        gathered_inputs=job.gathered_inputs,
        places=job.places,
        stages_per_place=job.stages_per_place,
        schedule=job.schedule,
        experts=job.experts,
    )
