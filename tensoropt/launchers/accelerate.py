"""The reader and writer of accelerate configs (YAML), as ``accelerate config`` writes them.

A config has ``distributed_type`` with ``fsdp_config``, ``parallelism_config``, ``deepspeed_config`` or
``megatron_lm_config``. All are read; FSDP and data parallelism are also written. Names and defaults are those
of ``accelerate/commands/launch.py`` and ``accelerate/utils/dataclasses.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from tensoropt.launchers import deepspeed
from tensoropt.launchers.job import (
    FULL,
    GATHERED_ONCE,
    NOTHING,
    JobError,
    Keys,
    LaunchedJob,
    Launcher,
    as_data_parallel,
    beyond,
    recipes_near,
)

NAME = "accelerate"
_STRATEGIES = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2,
    "1": 3, "2": 2, "3": 0, "4": 3, "5": 2,
}  # fmt: skip
_HARMLESS = (
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_*",
    "rdzv_*", "same_network", "tpu_*", "gpu_ids", "use_cpu", "num_machines", "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_backward_prefetch*", "fsdp_config.fsdp_use_orig_params",
    "fsdp_config.fsdp_forward_prefetch", "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_auto_wrap_policy",
    "fsdp_config.fsdp_min_num_params",
    "mpirun_config.*", "deepspeed_config.zero3_*", "deepspeed_config.gradient_clipping",
    "deepspeed_config.deepspeed_multinode_launcher", "megatron_lm_config.megatron_lm_gradient_clipping",
)  # fmt: skip


def _read(text: str) -> LaunchedJob:
    """Return the job of an accelerate config.

    Raises:
        JobError: the text is not accelerate's YAML, or a value is not a number.
    """
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise JobError(f"{NAME}: not YAML: {error}; give the file that `accelerate config` writes") from None
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise JobError(f"{NAME}: distributed_type is missing; give the file that `accelerate config` writes")
    keys = Keys(values, NAME)
    kind = str(keys.take("distributed_type")).upper().rpartition(".")[2]
    processes, precision = keys.number("num_processes"), str(keys.take("mixed_precision", "no"))
    if precision in ("fp16", "fp8"):
        keys.note(f"mixed_precision = {precision}: predicted as bfloat16")
    dtype = {"no": "float32", "none": ""}.get(precision.lower(), "bfloat16")
    if dynamo := keys.take("dynamo_config.dynamo_backend"):
        keys.note(f"dynamo_backend = {dynamo}: predicted without kernel fusion")
    kinds = {"FSDP": _fsdp, "DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron}
    job = kinds[kind](keys) if kind in kinds else _with_degrees(keys, LaunchedJob(launcher=NAME, data=None))
    if kind not in kinds and not kind.startswith(("MULTI_", "NO")):
        keys.note(f"distributed_type = {kind} is unknown: predicted as data parallelism")
    if job.batch is None and job.micro_batch is None:
        keys.note("the batch size is set in the script: predicted at the batch size that was explored")
    if job.micro_batches is None:
        keys.note("gradient accumulation is set in the script: predicted with 1 micro-batch")
    inside = job.tensor * job.context * job.places
    # A file counts processes, which are the devices.
    data = processes // inside if processes and processes % inside == 0 else None
    return replace(
        job,
        launcher=NAME,
        data=data if job.data is None else job.data,
        dtype=dtype or job.dtype,
        notes=(*job.notes, *keys.left(_HARMLESS)),
    )


def _fsdp(keys: Keys) -> LaunchedJob:
    f = "fsdp_config.fsdp_"
    reshard = keys.take(f + "reshard_after_forward", True)
    strategy = str(keys.take(f + "sharding_strategy", "") or (reshard if isinstance(reshard, str) else ""))
    if strategy.lower() in ("true", "false"):
        reshard, strategy = strategy.lower() == "true", ""
    if strategy and strategy.upper() not in _STRATEGIES:
        raise JobError(f"{NAME}: unknown sharding strategy '{strategy}'; use one of {', '.join(_STRATEGIES)}")
    stage = _STRATEGIES[strategy.upper()] if strategy else 3 if reshard else 2
    hybrid = strategy.upper().startswith("HYBRID") or strategy in ("4", "5")
    if stage == 2:
        keys.note(GATHERED_ONCE)
    keys.unlike(f + "offload_params", "predicted without offloading")
    keys.unlike(f + "cpu_offload", "predicted without offloading")
    return _with_degrees(
        keys,
        LaunchedJob(
            launcher=NAME,
            data=None,
            replicas=int(keys.take("num_machines") or 1) if hybrid else 1,
            stage=stage,
            root_once=stage == 3,
            recompute=FULL if keys.true(f + "activation_checkpointing") else NOTHING,
        ),
    )


def _with_degrees(keys: Keys, job: LaunchedJob) -> LaunchedJob:
    p = "parallelism_config.parallelism_config_"
    tensor, context = keys.degree(p + "tp_size"), keys.degree(p + "cp_size")
    replicas, shards = keys.degree(p + "dp_replicate_size"), keys.degree(p + "dp_shard_size")
    keys.unlike(p + "sp_size", "not part of the prediction", (None, 1))
    keys.unlike(p + "cp_comm_strategy", "predicted with an all-gather", (None, "allgather"))
    said = any(keys.given(p + name) for name in ("dp_replicate_size", "dp_shard_size"))
    return replace(
        job,
        data=replicas * shards if said else None,
        replicas=replicas if said and shards > 1 else job.replicas,
        stage=job.stage if not said or shards > 1 or context > 1 else 0,
        tensor=tensor,
        context=context,
    )


def _deepspeed(keys: Keys) -> LaunchedJob:
    d = "deepspeed_config."
    file = keys.take(d + "deepspeed_config_file")
    if file:
        raise JobError(f"{NAME}: the config of DeepSpeed is in {file}; give that file, as deepspeed:{file}")
    stage, steps = keys.number(d + "zero_stage", 2), keys.number(d + "gradient_accumulation_steps")
    for name in ("offload_optimizer_device", "offload_param_device"):
        keys.unlike(d + name, "predicted without offloading", (None, "none"))
    own = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": steps}
    return replace(deepspeed.of_values(own), notes=())


def _megatron(keys: Keys) -> LaunchedJob:
    m = "megatron_lm_config.megatron_lm_"
    tensor, places = keys.degree(m + "tp_degree"), keys.degree(m + "pp_degree")
    along = keys.true(m + "sequence_parallelism") and tensor > 1
    return LaunchedJob(
        launcher=NAME,
        data=None,
        tensor=tensor,
        places=places,
        sequence_parallel=along,
        gathered_inputs=along,
        stage=1 if keys.true(m + "use_distributed_optimizer") else 0,
        recompute="attention core" if keys.true(m + "recompute_activations") else NOTHING,
        micro_batches=keys.number(m + "num_micro_batches"),
    )


_ABOVE = """\
# For `accelerate launch --config_file FILE SCRIPT`, accelerate 1.15. The script says the rest: the model, the
# data, {batch} samples for each process at once.
"""
_ACCUMULATED = """\
# And Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin({steps}, sync_each_batch=True)).
"""
_SEVERAL = "# On each machine: --machine_rank, --main_process_ip and --main_process_port.\n"


def _refusal(job: LaunchedJob) -> str:
    degrees = {
        "tensor parallelism, for which the script prepares the model": job.tensor,
        "context parallelism, for which the script splits the data": job.context,
        "a pipeline": job.places,
        "experts over ranks": job.experts,
    }
    if words := beyond(degrees):
        return words
    if job.stage == 1 or (job.stage == 2 and (job.micro_batches or 1) > 1):
        return f"ZeRO-{job.stage}: its FSDP gathers parameters in every micro-batch"
    if job.recompute not in (NOTHING, FULL) or job.every > 1 or job.first is not None:
        return f"recomputation of '{job.recompute}'"
    if job.recompute == FULL and not job.stage:
        return "recomputation without sharding, which a switch of the model does"
    return ""


def _variants(job: LaunchedJob) -> list[LaunchedJob]:
    like = as_data_parallel(job, NAME)
    # Other ranks' memory savings are approximated by shards; accelerate has no stage 1.
    stages = dict.fromkeys((job.stage if like.data == job.data else 3, 3, 0))
    return [
        replace(
            like, stage=stage, replicas=job.replicas if stage else 1, root_once=stage == 3, recompute=recipe
        )
        for stage in stages
        for recipe in recipes_near(job, (NOTHING, FULL))
    ]


def _write(job: LaunchedJob) -> str:
    data, steps = job.data or 1, job.micro_batches or 1
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if job.stage else "MULTI_GPU" if data > 1 else "NO",
        "mixed_precision": "bf16" if job.dtype == "bfloat16" else "no",
        "num_machines": job.nodes,
        "num_processes": data,
    }
    if job.stage:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": job.stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if job.block_classes else "NO_WRAP",
            "fsdp_activation_checkpointing": job.recompute == FULL,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if job.block_classes:
            config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(job.block_classes)
    if job.replicas > 1:
        p = "parallelism_config_dp_"
        shards = data // job.replicas
        config["parallelism_config"] = {f"{p}replicate_size": job.replicas, f"{p}shard_size": shards}
    above = _ABOVE.format(batch=max((job.batch or data) // (data * steps), 1))
    above += _ACCUMULATED.format(steps=steps) if steps > 1 else ""
    return above + (_SEVERAL if job.nodes > 1 else "") + yaml.safe_dump(config, sort_keys=False)


LAUNCHER = Launcher(NAME, "config.yaml", _read, _write, _refusal, _variants, names_blocks=True)
