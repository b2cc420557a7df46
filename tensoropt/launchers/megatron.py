"""The reader and writer of Megatron-LM's arguments (of ``pretrain_gpt.py``), given as text or in a file.

Names and defaults are those of ``megatron/training/arguments.py``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from tensoropt.launchers.job import (
    AS_BFLOAT16,
    FULL,
    KEPT_IN_HALF,
    NOTHING,
    JobError,
    Keys,
    LaunchedJob,
    Launcher,
    recipes_near,
)

NAME = "megatron"
_ABOUT = '"--tensor-model-parallel-size 8 ..."'
_CORE, _FUNCTIONS = "attention core", "norms and activations"
_MODULES = {
    frozenset(("core_attn",)): _CORE,
    frozenset(("layernorm",)): _FUNCTIONS,
    frozenset(("moe_act",)): _FUNCTIONS,
    frozenset(("layernorm", "moe_act")): _FUNCTIONS,
}
"""The recomputed part of a block by the modules in ``--recompute-modules``."""
_RECIPES = (NOTHING, FULL, _CORE, _FUNCTIONS)
_GATHERED = "all_gather"
"""The value of ``--cp-comm-type`` for gathered keys and values, as Transformer Engine spells it."""
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_ABOVE = """\
# Arguments of pretrain_gpt.py of Megatron-LM core_v0.15 to core_v0.19: parallelism and batch only. Add those
# of the model (--num-layers, --hidden-size, --num-attention-heads, --max-position-embeddings ...), of
# the data (--data-path, --tokenizer-type ...) and of training (--train-iters, --lr ...).
"""
_HARMLESS = (
    # Training, data and logging; ``explore`` defines the model.
    "train-*", "lr*", "min-lr", "weight-decay*", "adam-*", "clip-grad", "init-method-std", "seed", "log-*",
    "tensorboard-*", "wandb-*", "save*", "load*", "eval-*", "data-*", "mock-data", "split", "vocab-*",
    "merge-*",
    "tokenizer-*", "exit-*", "ckpt-*", "dist-ckpt-*", "distributed-*", "no-save-*", "no-load-*",
    "num-workers",
    "num-dataset-builder-threads", "timing-*", "no-masked-softmax-fusion", "make-vocab-size-divisible-by",
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
    "group-query-attention", "max-position-embeddings", "position-embedding-type", "rotary-*", "swiglu",
    "normalization", "norm-epsilon", "disable-bias-linear", "untie-embeddings-and-output-weights",
    "kv-channels",
    "use-rotary-position-embeddings", "qk-layernorm", "num-experts", "moe-router-*", "moe-ffn-hidden-size",
    "moe-layer-freq", "moe-aux-loss-coeff", "add-qkv-bias", "use-mcore-models", "use-flash-attn",
    "transformer-impl", "attention-backend", "no-bias-*-fusion", "overlap-grad-reduce",
    "overlap-param-gather",
    "accumulate-allreduce-grads-in-fp32", "no-create-attention-mask-in-dataloader", "manual-gc*",
    "disable-straggler-*", "exit-duration-in-mins", "attention-softmax-in-fp32",
)  # fmt: skip


def _read(text: str) -> LaunchedJob:
    """Return the job of Megatron-LM's arguments; words before the first argument are ignored.

    Raises:
        JobError: there are no arguments, or a degree is not a number.
    """
    keys = Keys(_arguments(text), NAME)
    tensor, places = keys.degree("tensor-model-parallel-size"), keys.degree("pipeline-model-parallel-size")
    along, context = keys.true("sequence-parallel"), keys.degree("context-parallel-size")
    micro_batch, batch = keys.number("micro-batch-size"), keys.number("global-batch-size")
    per_place = _stages_per_place(keys, places)
    stage, replicas, root_once = _sharded(keys)
    recompute, first = _recomputed(keys)
    ring = str(keys.take("cp-comm-type", "p2p")).split()
    if {word.replace("_", "").lower() for word in ring} - {"p2p", "allgather"}:
        keys.note(f"cp-comm-type = {' '.join(ring)}: predicted with gathered keys and values")
    if keys.number("expert-tensor-parallel-size", tensor) not in (tensor, 1):
        keys.note("expert-tensor-parallel-size: predicted with the ranks of tensor-model-parallel-size")
    half = keys.true("bf16") or keys.true("fp16")
    if keys.true("fp16"):
        keys.note(AS_BFLOAT16)
    if half:
        keys.note(KEPT_IN_HALF)
    for name in ("fp8-format", "fp8-recipe", "fp4-format"):
        keys.unlike(name, "predicted with products in bfloat16")
    for name in ("optimizer-cpu-offload", "cpu-offloading-num-layers", "optimizer-offload-fraction"):
        keys.unlike(name, "predicted without offloading", (None, False, "0", "1.0"))
    keys.unlike("tp-comm-overlap", "predicted as collectives without overlap")
    keys.unlike("rampup-batch-size", "predicted at the global batch size")
    if keys.true("no-overlap-p2p-communication"):
        keys.note("no-overlap-p2p-communication: predicted with messages that overlap")
    optimizer = str(keys.take("optimizer", "adam"))
    if optimizer not in ("adam", "sgd"):
        keys.note(f"optimizer = {optimizer}: predicted with the optimizer of --optimizer")
    return LaunchedJob(
        launcher=NAME,
        data=None,
        replicas=replicas,
        tensor=tensor,
        context=context,
        ring=context > 1 and ring == ["p2p"],
        experts=keys.degree("expert-model-parallel-size"),
        stage=stage,
        root_once=root_once,
        sequence_parallel=along and tensor > 1,
        # Korthikanti et al., section 4.2.2: inputs gathered along the sequence are not kept.
        gathered_inputs=along and tensor > 1,
        recompute=recompute,
        first=first,
        places=places,
        stages_per_place=per_place,
        schedule="interleaved_1f1b" if per_place > 1 else "1f1b",
        batch=batch,
        micro_batch=micro_batch,
        sequence=keys.number("seq-length"),
        dtype="bfloat16" if half else "float32",
        optimizer={"adam": "adam_fused", "sgd": "momentum"}.get(optimizer, ""),
        notes=keys.left(_HARMLESS),
    )


def _arguments(text: str) -> dict[str, str | bool]:
    # Scripts continue lines with backslashes; their variables are not expanded.
    try:
        words = shlex.split(re.sub(r"\\\s*\n", " ", text), comments=True)
    except ValueError as error:
        raise JobError(f"{NAME}: {error}; give the arguments of pretrain_gpt.py in quotes") from None
    found: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            found[name.replace("_", "-")] = value or True
            name = "" if value else name.replace("_", "-")
        elif name:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    if not found:
        raise JobError(f"{NAME}: '{text[:40]}' has no arguments; give them as {NAME}:{_ABOUT}")
    variables = [
        f"--{key} {value}" for key, value in found.items() if isinstance(value, str) and "$" in value
    ]
    if variables:
        raise JobError(
            f"{NAME}: {', '.join(variables[:3])}: a script's variables are not expanded; give the "
            "arguments with their values"
        )
    return found


def _stages_per_place(keys: Keys, places: int) -> int:
    layers, each = keys.number("num-layers"), keys.number("num-layers-per-virtual-pipeline-stage")
    if each and layers and places > 1:
        return max(layers // places // each, 1)
    if each and places > 1:
        keys.note(
            "num-layers-per-virtual-pipeline-stage without num-layers: predicted with 2 stages on each rank"
        )
        return 2
    keys.unlike("pipeline-model-parallel-layout", "predicted with equal numbers of blocks per stage")
    return (keys.number("num-virtual-stages-per-pipeline-rank", 1) or 1) if places > 1 else 1


def _sharded(keys: Keys) -> tuple[int, int, bool]:
    """Return ZeRO stage, replicas, and whether parameters outside blocks are gathered once per step."""
    strategy = keys.word("data-parallel-sharding-strategy", _SHARDED, "optim_grads_params")
    replicas = keys.degree("num-distributed-optimizer-instances")
    state = 1 if keys.true("use-distributed-optimizer") else 0
    if keys.true("use-torch-fsdp2"):
        keep = keys.true("torch-fsdp2-no-reshard-after-forward")
        return (2 if keep else 3), replicas, not keep
    if keys.true("use-megatron-fsdp") or keys.true("use-custom-fsdp"):
        return strategy, replicas, False
    return state, replicas, False


def _recomputed(keys: Keys) -> tuple[str, int | None]:
    """Return a block's recomputed part, and how many first blocks of a stage recompute it; None for all."""
    usual = "selective" if keys.true("recompute-activations") else ""
    granularity, method = str(keys.take("recompute-granularity", usual)), keys.take("recompute-method")
    layers = keys.number("recompute-num-layers", 1) or 1
    modules = frozenset(str(keys.take("recompute-modules", "core_attn")).split())
    keys.unlike("distribute-saved-activations", "predicted with whole block inputs on each rank")
    if not granularity:
        return NOTHING, None
    if granularity == "selective":
        if modules not in _MODULES:
            keys.note(f"recompute-modules = {' '.join(sorted(modules))}: predicted as core_attn")
        return _MODULES.get(modules, _CORE), None
    if granularity != FULL:
        raise JobError(
            f"{NAME}: --recompute-granularity {granularity} is neither full nor selective; give one"
        )
    if method == "block":
        return FULL, layers
    if layers > 1:
        keys.note(
            f"recompute-num-layers = {layers}: predicted with each block recomputed alone, which keeps "
            f"{layers} times as many block inputs"
        )
    return FULL, None


def _refusal(job: LaunchedJob) -> str:
    if job.schedule not in ("1f1b", "interleaved_1f1b") and job.places > 1:
        return f"the schedule {job.schedule}"
    if job.gathered_inputs != job.sequence_parallel:
        return "sequence parallelism that keeps gathered inputs for backward"
    if job.every > 1 or job.recompute not in _RECIPES:
        return f"recomputation of '{job.recompute}'"
    return ""


def _variants(job: LaunchedJob) -> list[LaunchedJob]:
    schedule = "interleaved_1f1b" if job.stages_per_place > 1 else "1f1b"
    common = replace(job, launcher=NAME, every=1, schedule=schedule, root_once=False)
    ways = (True, False) if job.tensor > 1 else (False,)
    rings = (True, False) if job.context > 1 else (False,)
    return [
        replace(common, sequence_parallel=along, gathered_inputs=along, ring=ring, recompute=recipe)
        for recipe in recipes_near(job, _RECIPES)
        for along in ways
        for ring in rings
    ]


def _write(job: LaunchedJob) -> str:
    fsdp, full, part = job.stage > 1, job.recompute == FULL, job.recompute not in (NOTHING, FULL)
    micro_batch = max((job.batch or 0) // (job.data or 1) // (job.micro_batches or 1), 1)
    # What is True is a switch, and what is False or None is left out.
    values: dict[str, object] = {
        "tensor-model-parallel-size": job.tensor,
        "pipeline-model-parallel-size": job.places,
        "num-virtual-stages-per-pipeline-rank": job.stages_per_place > 1 and job.stages_per_place,
        "context-parallel-size": job.context > 1 and job.context,
        "cp-comm-type": job.context > 1 and ("p2p" if job.ring else _GATHERED),
        "expert-model-parallel-size": job.experts > 1 and job.experts,
        "sequence-parallel": job.sequence_parallel,
        "use-distributed-optimizer": job.stage > 0,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": fsdp and {n: name for name, n in _SHARDED.items()}[job.stage],
        "ckpt-format": fsdp and "fsdp_dtensor",  # the only format it starts with
        "num-distributed-optimizer-instances": job.replicas > 1 and job.replicas,
        "overlap-grad-reduce": True,
        "overlap-param-gather": job.stage > 0,
        "recompute-granularity": "full" if full else part and "selective",
        "recompute-method": full and ("block" if job.first else "uniform"),
        "recompute-num-layers": full and (job.first or 1),
        "recompute-modules": part and ("core_attn" if job.recompute == _CORE else "layernorm"),
        "micro-batch-size": job.batch and micro_batch,
        "global-batch-size": job.batch,
        "seq-length": job.sequence,
        "bf16": job.dtype == "bfloat16",
    }
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items() if value]
    lines = " \\\n".join(words)
    return f"{_ABOVE}{_connections(job)}{lines}\n"


def _connections(job: LaunchedJob) -> str:
    """Return a comment on the environment that Megatron-LM requires on GPUs before Blackwell."""
    if job.stage > 1:
        return "# In the environment: CUDA_DEVICE_MAX_CONNECTIONS is not 1.\n"
    if job.tensor > 1 or job.context > 1:
        return "# In the environment: CUDA_DEVICE_MAX_CONNECTIONS=1.\n"
    return ""


LAUNCHER = Launcher(NAME, _ABOUT, _read, _write, _refusal, _variants)
