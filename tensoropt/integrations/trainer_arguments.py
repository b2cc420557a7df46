"""Arguments of Hugging Face's ``Trainer`` that a plan cannot follow, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tensoropt.errors import PlanError

_PRECISION = "a plan computes in the type that its model was explored with; explore with --dtype bfloat16"
_SHARDING = "the plan decides where the model's parameters are"
_COMPILED = "it would wrap the model that the plan runs"
_RECOMPUTED = "the plan decides which blocks are recomputed"
_DDP = "it is a setting of DistributedDataParallel, which a plan does not use"
_BATCHES = "each rank loads the rows of its share in the plan"
_MODEL_LOSS = "the loss that was explored is part of the plan; build it into the model, or explore with loss="
_REFUSED = {
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "fsdp": _SHARDING,
    "deepspeed": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_compile": _COMPILED,
    "use_liger_kernel": "it replaces parts of the model; apply it before the model is explored",
    "neftune_noise_alpha": "it hooks the model's embedding, and a plan calls no hooks",
    "gradient_checkpointing": _RECOMPUTED,  # transformers also calls it activation_checkpointing
    "auto_find_batch_size": "the plan is for one batch size",
    "label_smoothing_factor": _MODEL_LOSS,
    "save_on_each_node": "rank 0 alone writes the model; use a folder that all nodes share",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
}
"""Training argument that a plan cannot follow -> reason; the values False and None are fine."""
_REFUSED_PARTS = {
    "model_init": "a plan is for one model; build it, and pass it as model",
    "compute_loss_func": _MODEL_LOSS,
}
"""Argument of ``Trainer`` itself that a plan cannot follow -> reason."""
_ACCELERATOR = ("split_batches", "dispatch_batches")
_ORDERS = ("random", "sequential")


def check_arguments(model: nn.Module, args: Any, more: Mapping[str, Any]) -> None:
    """Refuse arguments of a trainer that a plan cannot follow.

    Raises:
        PlanError: names the first refused argument, the reason and the remedy.
    """
    if isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "save_pretrained"):
        raise PlanError(
            f"{type(model).__name__} wraps the model, but the plan decides its layout on ranks; "
            "pass the bare module, which is inside (.module)"
        )
    if not hasattr(model, "save_pretrained"):
        raise PlanError(
            f"PlanTrainer saves models by their save_pretrained, which {type(model).__name__} does not have; "
            "pass a model of transformers or peft, or write the loop with tensoropt.parallelize"
        )
    for name, why in _REFUSED.items():
        if value := getattr(args, name, None):
            # Not "leave it out": TRL enables some of them by default.
            remedy = f"pass {name}=False" if value is True else f"leave {name} out"
            raise PlanError(f"PlanTrainer cannot follow {name}={value!r}: {why}, and {remedy}")
    for name, why in _REFUSED_PARTS.items():
        if more.get(name) is not None:
            raise PlanError(f"PlanTrainer takes no {name}: {why}")
    for name in _ACCELERATOR:
        if getattr(args.accelerator_config, name, None):
            raise PlanError(f"PlanTrainer cannot follow {name}=True: {_BATCHES}; leave {name} out")
    if (order := args.train_sampling_strategy) not in _ORDERS:
        raise PlanError(
            f"PlanTrainer cannot follow train_sampling_strategy={order!r}: {_BATCHES}; pass one of "
            f"{', '.join(_ORDERS)}"
        )
    if not args.average_tokens_across_devices:
        raise PlanError(
            "PlanTrainer cannot follow average_tokens_across_devices=False: the loss of a plan is that of "
            "the global batch; leave it out"
        )


def check_accelerator(accelerator: Any) -> None:
    """Refuse settings of accelerate made outside of Trainer's arguments, such as by ``accelerate launch``.

    Raises:
        PlanError: accelerate is configured for something that a plan cannot follow.
    """
    state = accelerator.state
    configured = {
        "FSDP": getattr(state, "fsdp_plugin", None) is not None,
        "DeepSpeed": getattr(state, "deepspeed_plugin", None) is not None,
        "its own parallelism": getattr(accelerator, "parallelism_config", None) is not None,
        "mixed precision": accelerator.mixed_precision != "no",
        "torch.compile": state.dynamo_plugin.backend.value not in (None, "NO"),
    }
    if found := [name for name, on in configured.items() if on]:
        raise PlanError(
            f"accelerate is configured for {' and '.join(found)}, but the plan decides how the model is run; "
            "start the job by torchrun, without accelerate's configuration"
        )
