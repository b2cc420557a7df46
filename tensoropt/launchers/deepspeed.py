"""The reader and writer of DeepSpeed's JSON configs (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tensoropt.launchers.job import (
    AS_BFLOAT16,
    FULL,
    KEPT_IN_HALF,
    NOTHING,
    JobError,
    Keys,
    LaunchedJob,
    Launcher,
    as_data_parallel,
    beyond,
    recipes_near,
)

NAME = "deepspeed"
_HARMLESS = (
    "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "prescale_gradients", "scheduler.*",
    "optimizer.params.*", "fp16.*", "bf16.*", "tensorboard.*", "wandb.*", "csv_monitor.*", "comms_logger.*",
    "flops_profiler.*", "dump_state", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization.*bucket_size", "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter", "zero_optimization.allgather_partitions",
    "zero_optimization.round_robin_gradients", "zero_optimization.sub_group_size",
    "zero_optimization.stage3_*", "memory_breakdown", "data_types.*", "checkpoint.*", "aio.*",
    "communication_data_type", "seq_parallel_communication_data_type",
    "zero_optimization.load_from_fp32_weights",
)  # fmt: skip
_OFFLOADING = ("pin_memory", "nvme_path", "buffer_count", "buffer_size", "fast_init", "ratio", "max_in_cpu")


def _read(text: str) -> LaunchedJob:
    """Return the job of a DeepSpeed config.

    Raises:
        JobError: the text is not a JSON object, or a value is not a number.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{NAME}: not JSON: {error}; give the file of --deepspeed_config") from None
    if not isinstance(values, dict):
        raise JobError(f"{NAME}: the config is not a JSON object; give the file of --deepspeed_config")
    return of_values(values)


def of_values(values: Mapping[str, Any]) -> LaunchedJob:
    """Return the job of a parsed config."""
    keys, z = Keys(values, NAME), "zero_optimization."
    stage = keys.number(z + "stage", 0) or 0
    if stage not in range(4):
        raise JobError(f"{NAME}: {z}stage is {stage}; give 0, 1, 2 or 3")
    batch, micro_batch = keys.number("train_batch_size"), keys.number("train_micro_batch_size_per_gpu")
    accumulated = keys.number("gradient_accumulation_steps")
    if batch is None and micro_batch is None:
        keys.note("the script sets the batch size (auto): predicted at the explored one")
    for name in ("offload_optimizer", "offload_param"):
        keys.unlike(f"{z}{name}.device", "predicted without offloading", (None, "none"))
        for detail in _OFFLOADING:
            keys.take(f"{z}{name}.{detail}")
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        keys.unlike(z + name, "predicted with shards over all data-parallel ranks", (None, 1, 0, -1, "auto"))
    quantised = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    for name in quantised:
        keys.unlike(z + name, "predicted without quantised communication")
    for name in ("sequence_parallel_size", "pipeline.stages", "hybrid_engine.enabled"):
        keys.unlike(name, "not part of the prediction", (None, False, 1, "auto"))
    recomputed = values.get("activation_checkpointing")
    for name in recomputed if isinstance(recomputed, Mapping) else ():
        keys.unlike(f"activation_checkpointing.{name}", "this file does not say what the script recomputes")
    if keys.true("fp16.enabled"):
        keys.note(AS_BFLOAT16)
    half = keys.true("fp16.enabled") or keys.true("bf16.enabled")
    said = half or keys.given("fp16.enabled") or keys.given("bf16.enabled")
    if half:
        keys.note(KEPT_IN_HALF)
    name = str(keys.take("optimizer.type", "") or "")
    if name and name.lower() not in ("adam", "adamw", "sgd", "auto"):
        keys.note(f"optimizer.type = {name}: predicted with the optimizer of --optimizer")
    return LaunchedJob(
        launcher=NAME,
        data=None,
        tensor=keys.degree("tensor_parallel.autotp_size"),
        stage=stage,
        batch=batch,
        micro_batch=micro_batch,
        micro_batches=accumulated,
        dtype="bfloat16" if half else "float32" if said else "",
        optimizer={"adam": "adam_fused", "adamw": "adam_fused", "sgd": "sgd"}.get(name.lower(), ""),
        notes=keys.left(_HARMLESS),
    )


def _refusal(job: LaunchedJob) -> str:
    degrees = {
        "tensor parallelism inside attention and MLP": job.tensor,
        "context parallelism": job.context,
        "a pipeline, which its PipelineModule builds": job.places,
        "experts over ranks, which its MoE layer builds": job.experts,
        "shards over a part of the replicas": job.replicas,
    }
    if words := beyond(degrees):
        return words
    return (
        "" if job.recompute in (NOTHING, FULL) and job.every == 1 else f"recomputation of '{job.recompute}'"
    )


def _variants(job: LaunchedJob) -> list[LaunchedJob]:
    like = as_data_parallel(job, NAME)
    # Shards replace the memory savings of tensor parallelism or stages.
    stages = [job.stage] if like.data == job.data else [3, 1]
    return [
        replace(like, stage=stage, recompute=recipe)
        for stage in stages
        for recipe in recipes_near(job, (NOTHING, FULL))
    ]


def _write(job: LaunchedJob) -> str:
    """Return the config of a job that DeepSpeed can express; recomputation is left to the model's code."""
    data = job.data or 1
    config: dict[str, Any] = {}
    if job.batch:
        config["train_batch_size"] = job.batch
        config["train_micro_batch_size_per_gpu"] = max(job.batch // data // (job.micro_batches or 1), 1)
    config["gradient_accumulation_steps"] = job.micro_batches or 1
    config["zero_optimization"] = {"stage": job.stage, "overlap_comm": True, "contiguous_gradients": True}
    config["bf16"] = {"enabled": job.dtype == "bfloat16"}
    return json.dumps(config, indent=2) + "\n"


LAUNCHER = Launcher(NAME, "ds.json", _read, _write, _refusal, _variants)
