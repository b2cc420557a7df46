"""The reader and writer of torchtitan configs (TOML).

Names and defaults are those of ``torchtitan/config/job_config.py``, versions 0.2; from 0.3 on, configs are
Python functions. As in its ``parallelize_llama``, tensor parallelism also splits the sequence between
matrix products, and FSDP keeps parameters gathered after forward only if told to, or with a pipeline.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

from tensoropt.launchers.job import (
    FULL,
    GATHERED_ONCE,
    NOTHING,
    JobError,
    Keys,
    LaunchedJob,
    Launcher,
    recipes_near,
)

NAME = "torchtitan"
_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "InterleavedZeroBubble": "zero_bubble",
    "ZBVZeroBubble": "zbv",
}
_DTYPES = {"bfloat16": "bfloat16", "float32": "float32"}
_ABOVE = """\
# Part of the file for --job.config_file of torchtitan 0.2.0 to 0.2.2; torchtitan 0.3 reads no TOML: there a
# config is a function in Python. Add the model ([model] name, flavor, hf_assets_path), the data
# ([training] dataset) and the optimizer.
"""
_PER_OPERATOR = "products/2"
"""The recomputed part for ``selective_ac_option = "op"``: every second product (``_get_custom_policy``)."""
_RECIPES = (NOTHING, FULL, _PER_OPERATOR)
_HARMLESS = (
    "job.*", "profiling.*", "metrics.*", "lr_scheduler.*", "checkpoint.*", "comm.*", "memory_estimation.*",
    "validation.*", "experimental.*", "debug.*", "model.name", "model.flavor", "model.*path", "optimizer.lr",
    "model.print_after_conversion", "optimizer.beta*", "optimizer.eps", "optimizer.weight_decay",
    "training.dataset*", "training.max_norm", "training.steps", "training.gc_*", "training.seed",
    "training.deterministic", "training.mixed_precision_reduce", "float8.emulate",
    "*.filter_fqns", "compile.components", "mx.*",
)  # fmt: skip


def _read(text: str) -> LaunchedJob:
    """Return the job of a torchtitan config.

    Raises:
        JobError: the text is not TOML, or a degree is not a number.
    """
    try:
        keys = Keys(tomllib.loads(text), NAME)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise JobError(f"{NAME}: not TOML: {error}; give the file that its --job.config_file names") from None
    p = "parallelism."
    replicas = keys.degree(p + "data_parallel_replicate_degree")
    tensor = keys.degree(p + "tensor_parallel_degree")
    context, places = keys.degree(p + "context_parallel_degree"), keys.degree(p + "pipeline_parallel_degree")
    shards = keys.number(p + "data_parallel_shard_degree", -1) or -1
    if shards < -1:
        raise JobError(f"{NAME}: {p}data_parallel_shard_degree is {shards}; give at least 1, or -1")
    schedule = keys.word(p + "pipeline_parallel_schedule", _SCHEDULES, "1F1B")
    batch, micro_batch, micro_batches = _accumulation(keys, None if shards == -1 else replicas * shards)
    recompute, every = _recomputed(keys)
    reshard = str(keys.take(p + "fsdp_reshard_after_forward", "default"))
    stage = 2 if reshard == "never" or (reshard == "default" and places > 1) else 3
    if stage == 2:
        keys.note(GATHERED_ONCE)
    keys.unlike(p + "context_parallel_rotate_method", "predicted with an all-gather", (None, "allgather"))
    keys.unlike(p + "disable_loss_parallel", "predicted with a loss whose vocabulary is split")
    keys.unlike(p + "enable_async_tensor_parallel", "predicted as collectives without overlap")
    keys.unlike(p + "pipeline_parallel_split_points", "predicted with equal numbers of blocks per stage")
    keys.unlike(p + "pipeline_parallel_layers_per_stage", "predicted with equal numbers of blocks per stage")
    keys.unlike("training.enable_cpu_offload", "predicted without offloading")
    compiled = "predicted without kernel fusion"
    keys.unlike("training.compile", compiled)
    keys.unlike("compile.enable", compiled)
    keys.unlike("model.converters", "predicted in the dtype of mixed precision")
    keys.unlike("optimizer.early_step_in_backward", "predicted with the optimizer after backward")
    fused = str(keys.take("optimizer.implementation", "fused")) == "fused"
    name = str(keys.take("optimizer.name", "AdamW"))
    if name not in ("Adam", "AdamW"):
        keys.note(f"optimizer.name = {name}: predicted with the optimizer of --optimizer")
    return LaunchedJob(
        launcher=NAME,
        data=None if shards == -1 else replicas * shards,
        replicas=replicas if shards != 1 else 1,
        tensor=tensor,
        context=context,
        experts=keys.degree(p + "expert_parallel_degree"),
        stage=0 if shards == 1 and context == 1 else stage,
        root_once=stage == 3 and reshard != "always",
        sequence_parallel=tensor > 1,
        recompute=recompute,
        every=every,
        places=places,
        stages_per_place=2 if schedule in ("interleaved_1f1b", "zero_bubble", "zbv") and places > 1 else 1,
        schedule=schedule,
        batch=batch,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        sequence=keys.number("training.seq_len", 2048),
        dtype=keys.word("training.mixed_precision_param", _DTYPES, "bfloat16"),
        optimizer=("adam_fused" if fused else "adam") if name in ("Adam", "AdamW") else "",
        notes=keys.left(_HARMLESS),
    )


def _accumulation(keys: Keys, data: int | None) -> tuple[int | None, int, int | None]:
    """Return samples per step (None if that depends on an unknown ``data``), samples per rank's micro-batch,
    and micro-batches per local batch (None without a pipeline)."""
    local = keys.number("training.local_batch_size", keys.number("training.batch_size", 8)) or 1
    whole = keys.number("training.global_batch_size", -1) or -1
    at_once = keys.number("parallelism.pipeline_parallel_microbatch_size", 1) or 1
    pipelined = keys.degree("parallelism.pipeline_parallel_degree") > 1
    batch = whole if whole > 0 else None if data is None else data * local
    return (batch, at_once, local // at_once) if pipelined else (batch, local, None)


def _recomputed(keys: Keys) -> tuple[str, int]:
    """Return the recomputed part of a block, and n if only every n-th block is recomputed."""
    mode = str(keys.take("activation_checkpoint.mode", "selective"))
    option = str(keys.take("activation_checkpoint.selective_ac_option", "2"))
    keys.take("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns")
    if mode in (NOTHING, FULL):
        return mode, 1
    if mode != "selective":
        keys.note(f"activation_checkpoint.mode = {mode} is unknown; predicted without recomputation")
        return NOTHING, 1
    if option == "op":
        return _PER_OPERATOR, 1
    if not option.isdecimal() or int(option) < 1:
        raise JobError(
            f"{NAME}: activation_checkpoint.selective_ac_option is '{option}'; give 'op' or a number"
        )
    return FULL, int(option)


def _refusal(job: LaunchedJob) -> str:
    if job.stage in (1, 2) and job.places == 1:
        return f"ZeRO-{job.stage}: its FSDP gathers parameters in every micro-batch"
    if job.stage == 0 and (job.tensor > 1 or job.context > 1):
        return "unsharded data parallelism with tensor or context parallelism"
    if job.tensor > 1 and not job.sequence_parallel:
        return "tensor parallelism without sequence parallelism"
    if job.gathered_inputs:
        return "regathering inputs of products in backward"
    if job.ring:
        return "a ring of keys and values: it has only PyTorch's ring attention, which works differently"
    if job.first is not None or job.recompute not in _RECIPES:
        return f"recomputation of '{job.recompute}'"
    return ""


def _variants(job: LaunchedJob) -> list[LaunchedJob]:
    stage = 0 if job.stage == 0 and job.tensor == job.context == job.places == 1 else 3
    common = replace(
        job, launcher=NAME, stage=stage if job.places == 1 else 2, root_once=stage == 3 and job.places == 1,
        sequence_parallel=job.tensor > 1, gathered_inputs=False, ring=False, first=None,
    )  # fmt: skip
    return [replace(common, recompute=recipe) for recipe in recipes_near(job, _RECIPES)]


def _write(job: LaunchedJob) -> str:
    data, shards = job.data or 1, 1 if job.stage == 0 else (job.data or 1) // job.replicas
    rank_batch = (job.batch or data) // data
    micro_batches = job.micro_batches or 1
    local = rank_batch if job.places > 1 else max(rank_batch // micro_batches, 1)
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": data // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": job.tensor,
        "context_parallel_degree": job.context,
        "pipeline_parallel_degree": job.places,
        # It reshards after forward only without a pipeline; its last layers stay gathered.
        "fsdp_reshard_after_forward": "default",
    }
    if job.experts > 1:
        parallelism["expert_parallel_degree"] = job.experts
    if job.places > 1:
        names = {schedule: name for name, schedule in _SCHEDULES.items()}
        parallelism["pipeline_parallel_schedule"] = names[job.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = max(rank_batch // micro_batches, 1)
    recomputed: dict[str, Any] = {"mode": job.recompute}
    if job.recompute == _PER_OPERATOR or job.every > 1:
        option = "op" if job.recompute == _PER_OPERATOR else str(job.every)
        recomputed = {"mode": "selective", "selective_ac_option": option}
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": job.batch or data * local}
    if job.sequence:
        training["seq_len"] = job.sequence
    if job.dtype in _DTYPES:
        training["mixed_precision_param"] = job.dtype
    tables = {"parallelism": parallelism, "activation_checkpoint": recomputed, "training": training}
    return _ABOVE + "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())
        for table, values in tables.items()
    )


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


LAUNCHER = Launcher(NAME, "job.toml", _read, _write, _refusal, _variants)
