"""accelerate's ``Accelerator`` for a model that runs by a plan.

:class:`PlanAccelerator` overrides methods that assume that ranks train copies of the model. It does not wrap
the model, a rank loads the rows of its share, and one optimizer step is one scheduler step.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch import nn
from torch.utils.data import DataLoader

from tensoropt.engine.parallel_model import ATTRIBUTE, parallel_of
from tensoropt.errors import PlanError, import_extra
from tensoropt.execute import parallelize
from tensoropt.integrations.rows import divided, prepared_by, rows_of_all
from tensoropt.integrations.trainer_arguments import check_accelerator
from tensoropt.plan.plan import Plan

import_extra("accelerate", "trainer", "tensoropt.integrations.accelerate")

from accelerate import Accelerator  # noqa: E402


class PlanAccelerator(Accelerator):
    """An ``Accelerator`` whose model runs by a plan, in a ``torchrun`` job.

    ``prepare`` takes a model, its optimizer, scheduler and loaders as usual. Losses, gradient norms and
    learning rates equal those of an ``Accelerator`` in one process with the plan's global batch and the same
    samplers. A loader's ``batch_size`` is the global batch size or a rank's share of it. With an
    ``IterableDataset`` it is the share. For evaluation in the data's order it may be any global batch size.

    Args:
        plan: a plan or its file; None if the model is parallelized already.
        more: arguments of ``Accelerator``.

    Raises:
        PlanError: a setting that plans do not support; also errors of :func:`tensoropt.parallelize`.
    """

    def __init__(self, *, plan: str | os.PathLike[str] | Plan | None = None, **more: Any):
        super().__init__(**more)
        check_accelerator(self)
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self, name):
                raise PlanError(
                    f"PlanAccelerator cannot follow {name}=True: each rank loads those rows of the batch "
                    f"that the plan assigns to it; leave {name} out"
                )
        self._plan = plan

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        for model in (part for part in args if isinstance(part, nn.Module)):
            self.prepare_model(model)  # first, as loaders need its shares
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Parallelize the model by the plan, unless that is done already, and return it."""
        if model in self._models:
            return model
        if self._models:
            raise PlanError(
                f"PlanAccelerator runs one model by its plan, but {type(model).__name__} is another; to "
                "move a model that is not trained, use model.to(accelerator.device)"
            )
        if self._plan is not None and not hasattr(model, ATTRIBUTE):
            parallelize(model, self._plan, device=self.device, batch="share")
        parallel_of(model)
        self._models.append(model)
        return model

    def prepare_data_loader(self, data_loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
        """Return a loader of this rank's rows."""
        if data_loader in self._dataloaders:
            return data_loader
        if not self._models:
            raise PlanError("PlanAccelerator has no model yet; prepare the model before its loaders")
        model = self._models[0]
        return prepared_by(self, divided(data_loader, model), model)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        # The base class would make a scheduler step for every rank.
        prepared.split_batches = True
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return tensors with the rows of all ranks; scalars, such as the global batch's loss, unchanged."""
        if use_gather_object:
            raise PlanError(
                "under a plan gather_for_metrics joins rows of tensors only; leave use_gather_object out, or "
                "gather objects by torch.distributed.all_gather_object"
            )
        return rows_of_all(self._models[0], input_data) if self._models else input_data

    # -- methods that assume a whole model or own rows on every rank ---------------------------------------

    def save_state(self, *_: Any, **__: Any) -> NoReturn:
        raise _shards("save_state", "tensoropt.save_checkpoint(path, model, optimizer, scheduler)")

    def load_state(self, *_: Any, **__: Any) -> NoReturn:
        raise _shards("load_state", "tensoropt.load_checkpoint(path, model, optimizer, scheduler)")

    def save_model(self, *_: Any, **__: Any) -> NoReturn:
        raise _shards("save_model", "tensoropt.save_pretrained(model, folder)")

    def get_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise _shards("get_state_dict", "the module that `with tensoropt.whole(model) as plain:` gives")


def _shards(name: str, instead: str) -> PlanError:
    return PlanError(
        f"{name} assumes that a rank has the whole model, but a plan leaves each rank a part; use {instead}"
    )
