"""A strategy of Lightning's ``Trainer`` for models that run by a plan.

Unlike under Lightning's ``DTensor`` strategy, a plan decides the layout, a rank loads the rows of its share,
and checkpoints move between plans.
"""

from __future__ import annotations

import atexit
import copy
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tensoropt.engine.parallel_model import ATTRIBUTE, parallel_of
from tensoropt.engine.runtime import leave_job
from tensoropt.errors import PlanError, import_extra
from tensoropt.execute import load_checkpoint, parallelize, save_checkpoint, whole
from tensoropt.integrations.padding import padded
from tensoropt.integrations.rows import divided
from tensoropt.plan.plan import Plan

import_extra("lightning", "lightning", "tensoropt.integrations.lightning")

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout  # noqa: E402
from lightning.fabric.utilities.load import _METADATA_FILENAME  # noqa: E402
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging  # noqa: E402
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

_AVERAGING = (StochasticWeightAveraging, WeightAveraging)
_STATE = "plan"
"""The folder in a checkpoint that :func:`tensoropt.save_checkpoint` writes, beside Lightning's files."""


class PlanStrategy(ModelParallelStrategy):
    """A Lightning ``Trainer`` strategy whose model runs by a plan.

    One attribute of the ``LightningModule`` is the plan's model. Losses, clipping, accumulation and schedules
    equal those of a ``Trainer`` in one process with the plan's global batch. The module needs no change and
    no ``configure_model``.

    Checkpoints are folders, from which training can resume under any plan of the model. With
    ``weights_only=True`` they are files for ``load_from_checkpoint``.

    Args:
        plan: a plan or its file; None if ``configure_model`` calls :func:`tensoropt.parallelize`.
        model: the attribute's name; by default the only one with trained parameters.
        timeout: the longest wait of a collective.
        settings: arguments of :func:`tensoropt.parallelize`; ``batch`` is ``"share"`` by default.

    Raises:
        PlanError: at the trainer's start: a setting that plans do not support, trained parameters outside the
            model; also errors of :func:`tensoropt.parallelize`.
    """

    def __init__(
        self,
        plan: str | os.PathLike[str] | Plan | None = None,
        *,
        model: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **settings: Any,
    ):
        super().__init__(timeout=timeout)
        self._plan = plan
        self._settings = {"batch": "share", **settings}
        self._asked, self._name = model, ""

    def setup_environment(self) -> None:
        precision = self.precision_plugin.precision
        if precision != "32-true":
            raise PlanError(
                f"{type(self).__name__} cannot follow precision={precision!r}: a plan computes in the type "
                "that its model was explored with; explore with --dtype bfloat16, and leave precision out"
            )
        # Lightning never ends gloo's groups, whose threads would abort the process at exit.
        atexit.register(leave_job)
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, _AVERAGING) and trainer.state.fn == TrainerFn.FITTING:
                raise PlanError(
                    f"{type(callback).__name__} averages a copy of the whole module, but a rank has only "
                    "parts of it; average by lerp_ over the model's parameters, in a callback of your own"
                )
        # Fabric does this itself without `distributed_sampler_kwargs`; Trainer asserts that there are some.
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        # The base class would require a `configure_model` that parallelizes.
        super(ModelParallelStrategy, self).setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise PlanError(
                f"a plan's checkpoint has one optimizer, but configure_optimizers returned "
                f"{len(self.optimizers)}; use one with parameter groups"
            )

    def model_to_device(self) -> None:
        """Parallelize the model, and move the rest of the module to the device."""
        module = self.lightning_module
        self._name = self._name_of_model(module)
        model = module.get_submodule(self._name)
        if self._plan is not None and not hasattr(model, ATTRIBUTE):
            parallelize(model, self._plan, device=self.root_device, **self._settings)
        self._planned = parallel_of(model).model
        outside = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not name.startswith(self._prefix)
        ]
        if outside:
            raise PlanError(
                f"the plan is for {self._name}, but {type(module).__name__} also trains "
                f"{', '.join(outside[:3])}, whose gradients would not be summed over ranks; make it a part "
                "of the explored model, or freeze it"
            )
        module.to(self.root_device)

    def _name_of_model(self, module: nn.Module) -> str:
        done = [name for name, part in module.named_modules() if hasattr(part, ATTRIBUTE)]
        trained = [
            name for name, part in module.named_children() if any(p.requires_grad for p in part.parameters())
        ]
        names = done or ([self._asked] if self._asked is not None else trained)
        if not done and self._plan is None:
            raise PlanError(
                "PlanStrategy has no plan; pass one, or call tensoropt.parallelize in configure_model"
            )
        if len(names) != 1 or not names[0]:
            raise PlanError(
                f"PlanStrategy runs one attribute of a LightningModule by the plan, but "
                f"{type(module).__name__} has {len(names)} with trained parameters: "
                f"{', '.join(names) or 'none'}; keep the explored model in one, and pass its name as model"
            )
        return names[0]

    @property
    def _prefix(self) -> str:
        return f"{self._name}."

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None, so that loaders keep their own samplers, some of which Lightning would replace."""
        return None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's rows."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        batches = dataloader.batch_sampler
        if not isinstance(batches, _IndexBatchSamplerWrapper):
            return padded(divided(dataloader, self._planned), self._planned)
        # `predict` reads each batch's rows from it.
        inner = copy.copy(dataloader)
        inner.__dict__["batch_sampler"] = batches._batch_sampler
        own = padded(divided(inner, self._planned), self._planned)
        own.__dict__["batch_sampler"] = _IndexBatchSamplerWrapper(own.batch_sampler)
        return own

    # -- checkpoints ----------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module's parts outside of the plan's model."""
        state = self.lightning_module.state_dict()
        return {key: value for key, value in state.items() if not key.startswith(self._prefix)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing, because :meth:`save_checkpoint` writes this state together with the model."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise PlanError(
                "PlanStrategy writes folders of torch.distributed.checkpoint, which cannot follow "
                f"storage_options={storage_options!r}; leave it out"
            )
        path = Path(self.broadcast(filepath))
        if "optimizer_states" in checkpoint:
            optimizer = self.optimizers[0] if self.optimizers else None
            if self.is_global_zero:
                if path.is_file():
                    path.unlink()
                path.mkdir(parents=True, exist_ok=True)
            save_checkpoint(path / _STATE, self._planned, optimizer)
            if self.is_global_zero:
                torch.save(checkpoint, path / _METADATA_FILENAME)
            return
        with whole(self._planned, "cpu") as plain:
            weights = {self._prefix + key: value for key, value in plain.state_dict().items()}
        checkpoint["state_dict"] |= weights
        super(ModelParallelStrategy, self).save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        module = self.lightning_module
        training = module.trainer.state.fn == TrainerFn.FITTING
        if path.is_file():
            plain = super(ModelParallelStrategy, self).load_checkpoint(path, weights_only)
            if not (training and "optimizer_states" in plain):
                return plain
        optimizer = self.optimizers[0] if training and self.optimizers else None
        if not (path / _STATE).is_dir():
            raise PlanError(
                f"{path} has no folder '{_STATE}', so PlanStrategy did not write it; load the weights into "
                "the model before it is set up"
            )
        load_checkpoint(path / _STATE, self._planned, optimizer)
        rest: dict[str, Any] = torch.load(
            path / _METADATA_FILENAME, map_location="cpu", weights_only=weights_only
        )
        model = {k: v for k, v in module.state_dict().items() if k.startswith(self._prefix)}
        rest["state_dict"] = model | rest["state_dict"]
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
