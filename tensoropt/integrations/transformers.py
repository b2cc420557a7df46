"""Hugging Face's ``Trainer`` for a model that runs by a plan.

:class:`PlanTrainer` overrides methods that assume that ranks train copies of the model. It does not wrap the
model, a rank loads the rows of its share, and the loss is already the global batch's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError, import_extra
from tensoropt.execute import load_checkpoint, parallelize, save_checkpoint, save_pretrained
from tensoropt.integrations.rows import divided, prepared_by, rows_of_all
from tensoropt.integrations.trainer_arguments import check_accelerator, check_arguments
from tensoropt.plan.plan import Plan

for _package in ("accelerate", "transformers"):
    import_extra(_package, "trainer", "tensoropt.integrations.transformers")

from transformers import (  # noqa: E402
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.trainer_pt_utils import find_batch_size  # noqa: E402
from transformers.trainer_utils import align_special_tokens  # noqa: E402

_STATE = "plan"
"""The folder in one of Trainer's checkpoints that :func:`tensoropt.save_checkpoint` writes."""


class PlanTrainer(Trainer):
    """A ``Trainer`` whose model runs by a plan, in a ``torchrun`` job; every rank makes one.

    Losses, gradient norms, schedules and metrics equal those of a ``Trainer`` in one process with the global
    batch. ``per_device_train_batch_size`` is the plan's global batch divided by ``model.data_world``;
    ``per_device_eval_batch_size`` may have any value.

    A checkpoint has the model as ``save_pretrained`` writes it, and a folder ``plan`` with the optimizer's
    state, from which training can resume under any plan of the model.

    Args:
        model: a model of ``transformers`` or ``peft`` with initial weights; or, without ``plan``, a
            parallelized one.
        args: the training arguments.
        plan: a plan or its file.
        more: arguments of ``Trainer``.

    Raises:
        PlanError: an argument that plans do not support; also errors of :func:`tensoropt.parallelize`.
        CaptureError: the model cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        plan: str | os.PathLike[str] | Plan | None = None,
        **more: Any,
    ):
        self._run_by_plan(model, args, plan, more)
        super().__init__(model=model, args=args, **more)

    def _run_by_plan(
        self,
        model: nn.Module,
        args: TrainingArguments,
        plan: str | os.PathLike[str] | Plan | None,
        more: Mapping[str, Any],
    ) -> None:
        """Parallelize the model before the base class sees it."""
        check_arguments(model, args, more)
        if plan is not None:
            tokens = more.get("processing_class")
            if isinstance(tokens, PreTrainedTokenizerBase | ProcessorMixin):
                align_special_tokens(model, tokens)  # Trainer would do it too late for a parallelized model
            parallelize(model, plan, device=args.device, batch="share")
        self._parallel = parallel_of(model)
        self._rows, self._data_world = 0, self._parallel.engine.share.world
        rows, whole, world = args.per_device_train_batch_size, self._parallel.global_rows, self._data_world
        if rows * world != whole:
            raise PlanError(
                f"the plan is for global batches of {whole} rows, divided among {world} data-parallel ranks, "
                f"but per_device_train_batch_size={rows}; pass per_device_train_batch_size={whole // world}"
            )

    # -- overrides of accelerate's handling of model and data ----------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        check_accelerator(accelerator)
        accelerator.prepare_model = self._prepared_model
        accelerator.prepare_data_loader = self._prepared_loader
        accelerator.gather_for_metrics = self.gather_function = self._of_all_ranks

    def _prepared_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged, without DistributedDataParallel."""
        if model not in self.accelerator._models:
            self.accelerator._models.append(model)
        return model

    def _prepared_loader(self, loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
        """Return a loader of this rank's rows, given a loader with batches of the size of a rank's share."""
        model = self._parallel.model
        return prepared_by(self.accelerator, divided(loader, model, parts=True), model)

    def get_tp_size(self) -> int:
        """Return the number of ranks that pass the same rows; Trainer divides counts over all ranks by it."""
        return int(self.args.world_size) // self._data_world

    def floating_point_ops(self, inputs: Any) -> int:
        operations: int = super().floating_point_ops(inputs)
        # Counted from the elements of parameters; Trainer adds up all ranks.
        apart = any(not isinstance(p, DTensor) for p in self._parallel.model.parameters())
        return operations if apart else operations // self.get_tp_size()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()

    # -- the loss -------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        """Run one batch of a step, and explain failures of a subclass's own loss.

        Raises:
            PlanError: a subclass's ``compute_loss`` needs more than the model's loss.
        """
        try:
            return super().training_step(*args, **more)
        except (AttributeError, KeyError, TypeError, PlanError) as error:
            own = type(self).compute_loss
            if own.__module__.startswith("tensoropt."):
                raise
            raise PlanError(
                f"{own.__qualname__} failed ({type(error).__name__}: {error}). Under a plan, the model is "
                "called as it was explored, and in training returns only its loss, with None for logits. "
                "Explore it with its own loss: build that into its forward, or pass loss=function(output) to "
                "explore (the fourth item of a model file: model, args, kwargs, loss) and to "
                "tensoropt.parallelize(model, plan, batch='share', loss=...), and give PlanTrainer the result"
            ) from error

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Return the global batch's loss, weighted by its share of all accumulated batches' targets.

        With ``num_items_in_batch`` Trainer expects the sum of the targets' losses divided by that number.
        Under a plan the model returns their mean, which this method turns into that quotient.
        """
        targets = None
        if num_items_in_batch is not None:
            counted = inputs
            # Trainer tells from the model's name whether its loss skips the first token, which not all names
            # show; the divisor stays Trainer's count.
            shifts = getattr(model, "loss_function", None) is ForCausalLMLoss
            if shifts and not getattr(model.config, "is_encoder_decoder", False):
                counted = {"shift_labels": inputs["labels"][..., 1:], **inputs}
            targets = self._get_num_items_in_batch([counted], self.args.device)
            if targets == 0 and not return_outputs:
                # No rank has targets: the mean is NaN, and contributes nothing to the sum.
                return torch.zeros((), device=self.args.device, requires_grad=True)
        outputs = model(**inputs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        if targets is not None:
            loss = loss * (targets / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    # -- evaluation -----------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the global batch's loss, and logits and labels of this rank's rows if needed."""
        self._rows = find_batch_size(inputs)
        outputs = self._parallel.outputs
        self._parallel.outputs = "loss" if prediction_loss_only else "all"
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._parallel.outputs = outputs

    def _of_all_ranks(self, values: Any, **_: Any) -> Any:
        def own(value: torch.Tensor) -> torch.Tensor:
            # Trainer repeats a loss for as many rows as a full batch has.
            return value[: self._rows] if value.dim() else value

        return rows_of_all(self._parallel.model, tree_map_only(torch.Tensor, own, values))

    # -- checkpoints ----------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        save_pretrained(self._parallel.model, folder)
        if not self.args.should_save:
            return
        tokens = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokens is not None:
            tokens.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _training_state(self) -> tuple[nn.Module, Any, Any]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return self._parallel.model, optimizer, self.lr_scheduler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(os.path.join(output_dir, _STATE), *self._training_state())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not os.path.isdir(os.path.join(resume_from_checkpoint, _STATE)):
            raise PlanError(
                f"{resume_from_checkpoint} has no folder '{_STATE}': PlanTrainer did not write it, or wrote "
                "it with save_only_model=True; start from its weights with from_pretrained"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_checkpoint(os.path.join(checkpoint, _STATE), *self._training_state())
