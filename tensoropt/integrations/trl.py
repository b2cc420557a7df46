"""TRL's ``SFTTrainer`` for a model that runs by a plan.

Texts become batches as in TRL. The loss is that of the parallelized model. TRL would compute the same loss
from hidden states and the output layer's weight, of which a rank may have a shard only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensoropt.engine.parallel_model import ParallelModel
from tensoropt.errors import PlanError, import_extra
from tensoropt.integrations.transformers import PlanTrainer
from tensoropt.plan.plan import Plan

import_extra("trl", "trl", "tensoropt.integrations.trl")

from accelerate.utils import is_peft_model  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

_INPUTS = {"input_ids", "attention_mask", "labels"}
"""Inputs that TRL passes for texts."""
_JOINED = "it joins the rows that the plan divides"
_EXPLORED = "the loss that was explored is part of the plan"
_LEFT_OUT = (
    "PlanSFTTrainer leaves out entropy and mean_token_accuracy, which TRL computes from logits: when "
    "training by a plan the model returns only its loss"
)


class PlanSFTTrainer(PlanTrainer, SFTTrainer):
    """An ``SFTTrainer`` whose model runs by a plan, in a ``torchrun`` job; every rank makes one.

    Losses, gradient norms, schedules and token counts equal those of an ``SFTTrainer`` in one process.
    Metrics of logits (``entropy``, ``mean_token_accuracy``) are left out. Batches are padded to the plan's
    sequence length, which ``max_length`` may not exceed. Batch sizes and checkpoints follow the rules
    of :class:`~tensoropt.integrations.transformers.PlanTrainer`.

    Args:
        model: a model of ``transformers`` or ``peft`` (with its adapters) with initial weights; or, without
            ``plan``, a parallelized one.
        args: an ``SFTConfig`` with ``bf16=False`` and ``gradient_checkpointing=False``.
        plan: a plan or its file, for a call with ``input_ids``, ``attention_mask`` and ``labels``.
        more: arguments of ``SFTTrainer``.

    Warns:
        UserWarning: metrics are left out (on rank 0).

    Raises:
        PlanError: an argument that plans do not support; also errors of :func:`tensoropt.parallelize`.
        CaptureError: the model cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        args: SFTConfig,
        *,
        plan: str | os.PathLike[str] | Plan | None = None,
        **more: Any,
    ):
        super().__init__(model, args, plan=plan, **more)
        # SFTTrainer wraps the model's forward with one that computes the loss from hidden states.
        vars(self._base).pop("forward")
        vars(self._base).update(self._forward)
        if self.is_world_process_zero():
            warnings.warn(_LEFT_OUT, stacklevel=2)

    def _run_by_plan(
        self, model: Any, args: Any, plan: str | os.PathLike[str] | Plan | None, more: Mapping[str, Any]
    ) -> None:
        _check_arguments(model, args, more)
        tokens = getattr(more.get("processing_class"), "tokenizer", more.get("processing_class"))
        if tokens is not None:  # SFTTrainer does this later, when the model may no longer change
            tokens.eos_token = getattr(args, "eos_token", None) or tokens.eos_token
            tokens.pad_token = getattr(args, "pad_token", None) or tokens.pad_token or tokens.eos_token
        super()._run_by_plan(model, args, plan, more)
        if more.get("data_collator") is None:
            _check_inputs(self._parallel, args)
        self._base = model.get_base_model() if is_peft_model(model) else model
        self._forward = {name: value for name, value in vars(self._base).items() if name == "forward"}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Return the loss, weighted by ``PlanTrainer.compute_loss``, and count the tokens of all ranks."""
        metrics = self._metrics["train" if model.training else "eval"]
        if model.training:
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            self._total_train_tokens += self.accelerator.gather(mask.sum()).sum().item() // self.get_tp_size()
        metrics["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _check_arguments(model: nn.Module, args: Any, more: Mapping[str, Any]) -> None:
    def asks(name: str) -> Any:
        return getattr(args, name, None)  # plain TrainingArguments lack TRL's

    template = str(asks("chat_template_path") or "")
    refused = {
        "padding_free=True": (asks("padding_free"), f"{_JOINED}; leave it out"),
        "packing=True": (
            asks("packing") and asks("packing_strategy") != "wrapped",
            f"{_JOINED}; pass packing_strategy='wrapped', or leave it out",
        ),
        "activation_offloading=True": (
            asks("activation_offloading"),
            "the plan decides what is kept for the backward pass; leave it out",
        ),
        "loss_type='dft'": (asks("loss_type") == "dft", f"{_EXPLORED}; leave it out"),
        "router_aux_loss_coef": (
            _adds_to_loss(model, asks("router_aux_loss_coef")),
            f"{_EXPLORED}; pass 0.0",
        ),
        f"chat_template_path={template!r}": (
            template and not template.endswith((".jinja", ".j2")),
            "it may add tokens to the model; call trl.clone_chat_template before the model is explored",
        ),
        "compute_metrics": (
            more.get("compute_metrics") is not None,
            "under a plan SFTTrainer evaluates the loss, without logits; pass it to PlanTrainer, or "
            "leave it out",
        ),
        "peft_config": (
            more.get("peft_config") is not None,
            "the plan is for the model with its adapters; call get_peft_model before it is explored",
        ),
    }
    for name, (asked, why) in refused.items():
        if asked:
            raise PlanError(f"PlanSFTTrainer cannot follow {name}: {why}")


def _adds_to_loss(model: Any, coefficient: float | None) -> bool:
    config = model.config.get_text_config() if hasattr(model, "config") else None
    if not hasattr(config, "output_router_logits"):
        return False
    return bool(getattr(config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient)


def _check_inputs(parallel: ParallelModel, args: Any) -> None:
    """Refuse a plan for other inputs than texts, and batches longer than the plan's."""
    shapes = parallel.input_shapes()
    if shapes.keys() != _INPUTS:
        raise PlanError(
            f"SFTTrainer calls the model with {', '.join(sorted(_INPUTS))}, but the plan is for a call with "
            f"{', '.join(sorted(shapes))}; explore the model with the former, or pass a data_collator"
        )
    length, longest = shapes["input_ids"][1], getattr(args, "max_length", None)
    if longest is None or longest > length:
        raise PlanError(
            f"the plan is for sequences of {length} tokens, but max_length={longest} lets batches be longer; "
            f"pass max_length={length}"
        )
