"""torchtitan's ``Trainer`` for a model that runs by a plan.

torchtitan calls a model with tokens alone, draws its weights after it was parallelized, and adds up the
losses that ranks find for rows of their own. By a plan the model gets its targets too and returns the loss of
the global batch, the same on all ranks, and its weights are drawn while it is parallelized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError
from tensoropt.execute import parallelize
from tensoropt.integrations.torchtitan_model import draw, explored, explored_model, explored_spec
from tensoropt.plan.plan import load_plan

# After the module that names the extra where the package is missing.
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss  # isort: skip
from torchtitan.config import CompileConfig  # isort: skip
from torchtitan.distributed import ParallelDims  # isort: skip
from torchtitan.distributed import utils as dist_utils  # isort: skip
from torchtitan.tools.logging import logger  # isort: skip
from torchtitan.trainer import Trainer  # isort: skip

__all__ = ["PlanTitanTrainer", "by_plan", "explored"]

_DIVIDED = "the plan decides how the model is divided; leave it out"
_DEGREES = {
    "data_parallel_replicate_degree": (1,),
    "data_parallel_shard_degree": (1, -1),
    "tensor_parallel_degree": (1,),
    "pipeline_parallel_degree": (1,),
    "context_parallel_degree": (1,),
    "expert_parallel_degree": (1,),
}
"""Degrees of parallelism, and their values that ask for none."""


class PlanTitanTrainer(Trainer):
    """torchtitan's ``Trainer`` for a model that runs by a plan, made by ``config.build()`` in a ``torchrun``
    job.

    Losses, gradient norms, schedules and validation are those of a job of one process with the same
    configuration: ``local_batch_size`` is the global batch of the plan, of which each rank loads its share.
    The plan decides what ``parallelism``, ``activation_checkpoint`` and CUDA graphs decide otherwise.

    Checkpoints are torchtitan's own, under plans that shard (not under pipelines and placed plans).

    Raises:
        PlanError: the configuration asks for what a plan cannot do, or :func:`tensoropt.parallelize` raises
            it.
        CaptureError: the model cannot be captured.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        plan: str = ""
        """The plan's file"""

    def __init__(self, config: Any):
        _check(config)
        spec = replace(explored_spec(config.model_spec), parallelize_fn=self._planned)
        self._explored = replace(config, model_spec=spec)
        own = replace(
            self._explored,
            loss=PlanLoss.Config(),
            training=replace(config.training, disable_cuda_graphs=True),
            parallelism=replace(
                config.parallelism, enable_sequence_parallel=False, spmd_backend="partial_dtensor"
            ),
        )
        super().__init__(own)
        self.loss_fn.batch = self.parallel_dims.get_optional_mesh("batch")
        if self.config.validator.enable:
            self.validator.post_dataloading_process = _with_labels(self.validator.post_dataloading_process)
        logger.info(
            "The plan decides what is divided, kept and recomputed: parallelism, activation_checkpoint and "
            "CUDA graphs of the configuration are not used"
        )

    # -- the model ------------------------------------------------------------------------------------

    def init_distributed(self) -> ParallelDims:
        """Start the job and parallelize the model, which says what share of the batch this rank loads."""
        world = super().init_distributed().world_size
        with torch.device("meta"):
            model = explored_model(self._explored, self._explored.model_spec)
        parallelize(
            model,
            self._explored.plan,
            device=self.device,
            init_weights=draw,
            seed=self._seed(),
            batch="share",
        )
        self._parallel = parallel_of(model)
        if self.config.checkpoint.enable and world > 1:
            self._check_checkpoints()
        share = self._parallel.engine.share
        group = None if share is None else share.runtime.group(share.axes)
        shares = 1 if share is None else share.world
        training = self.config.training
        self._check_shape(training)
        self.config.training = replace(training, local_batch_size=training.local_batch_size // shares)
        return _Shares(world, shares, group, self.device)

    def _seed(self) -> int:
        """Return the seed that all ranks share, as ``torchtitan.distributed.utils.set_determinism``."""
        seed = [torch.initial_seed() if self.config.debug.seed is None else self.config.debug.seed]
        dist.broadcast_object_list(seed, 0)
        return seed[0]

    def _check_shape(self, training: Any) -> None:
        source, names = self._parallel.source, self._parallel.convention.input_names()
        shapes = {n: source.tensors[i].shape for n, i in zip(names, source.inputs, strict=True)}
        wanted, given = tuple(shapes["tokens"]), (training.local_batch_size, training.seq_len)
        if wanted != given:
            raise PlanError(
                f"the plan is for batches of {wanted[0]} rows of {wanted[1]} tokens, on all ranks together, "
                f"but local_batch_size={given[0]} and seq_len={given[1]}; pass local_batch_size={wanted[0]} "
                f"and seq_len={wanted[1]}"
            )

    def _check_checkpoints(self) -> None:
        if not all(isinstance(p, DTensor) for p in self._parallel.parameters.values()):
            raise PlanError(
                "torchtitan's checkpoints need every parameter on every rank, which pipelines and placed "
                "plans do not have; leave checkpoint.enable out, and write tensoropt.save_checkpoint("
                "path, trainer.model_parts[0], trainer.optimizers.optimizers[0])"
            )

    def _planned(self, model: nn.Module, **_: Any) -> nn.Module:
        """Return the parallelized model in place of torchtitan's, as ``ModelSpec.parallelize_fn``."""
        planned = self._parallel.model
        # What the trainer does with it next has been done: its shards are on the device, and drawn.
        planned.__dict__ |= {"to_empty": lambda **_: planned, "init_weights": lambda **_: None}
        return planned

    # -- batches --------------------------------------------------------------------------------------

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        inputs, labels, more = super().post_dataloading_process(input_dict, labels)
        # The other shares, too: nothing is added up over ranks afterwards.
        self.ntokens_seen += labels.numel() * (self.parallel_dims.dp_shard - 1)
        return inputs, labels, more | {"labels": labels}


def by_plan(config: Trainer.Config, plan: str = "") -> PlanTitanTrainer.Config:
    """Return a configuration for :class:`PlanTitanTrainer`: that of torchtitan's trainer, and the plan's file
    (``--plan`` of the command line)."""
    return PlanTitanTrainer.Config(plan=plan, **{f.name: getattr(config, f.name) for f in fields(config)})


class PlanLoss(BaseLoss):
    """The loss that the model returned, as torchtitan weighs losses: by the targets of its global batch.

    Attributes:
        batch: the mesh of the ranks that have different rows; None if there are none.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.batch: DeviceMesh | None = None

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the targets' losses, divided by the number in all accumulated batches if that is
        passed.

        Args:
            pred: the mean loss of the global batch.
            labels: this rank's share of the targets.
        """
        targets = (labels != IGNORE_INDEX).sum()
        if self.batch is not None:
            targets = dist_utils.dist_sum_tensor(targets, self.batch)
        if targets == 0:  # their mean is NaN, and to the sum over accumulated batches they add nothing
            return torch.zeros((), device=pred.device, requires_grad=True), {}
        total = pred * targets
        return total if global_valid_tokens is None else total / global_valid_tokens, {}


class _Shares(ParallelDims):
    """torchtitan's parallelism as far as its trainer asks for it: which ranks have different rows.

    The rest of a plan is no grid of torchtitan's; it counts as tensor parallelism, whose ranks have the same
    rows.
    """

    def __init__(self, world_size: int, shares: int, group: dist.ProcessGroup | None, device: torch.device):
        same = {"dp_replicate": 1, "cp": 1, "pp": 1, "ep": 1}
        super().__init__(
            **same,
            dp_shard=shares,
            tp=world_size // shares,
            world_size=world_size,
            spmd_backend="partial_dtensor",
        )
        self._device = device.type
        self._batch: DeviceMesh | None = None
        if group is not None:
            self._batch = DeviceMesh.from_group(group, device.type, mesh_dim_names=("batch",))

    @property
    def dp_cp_enabled(self) -> bool:
        """Whether the ranks' losses are parts of the global batch's; all have it whole."""
        return False

    def build_mesh(self) -> DeviceMesh:
        return init_device_mesh(self._device, (self.world_size,), mesh_dim_names=("world",))

    def get_optional_mesh(self, dims: Any, **_: Any) -> DeviceMesh | None:
        return self._batch if dims == "batch" else None

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        return {} if self._batch is None else {"batch": self._batch}


def _with_labels(process: Callable[..., Any]) -> Callable[..., Any]:
    """Return a validator's ``post_dataloading_process`` that gives the model its targets."""

    def processed(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        inputs, labels, more = process(*args, **kwargs)
        return inputs, labels, more | {"labels": labels}

    return processed


def _check(config: PlanTitanTrainer.Config) -> None:
    """Refuse what a plan cannot do.

    Raises:
        PlanError: the first thing that is refused, why, and the remedy.
    """
    if not config.plan:
        raise PlanError("PlanTitanTrainer has no plan; pass --plan FILE, or by_plan(config, FILE)")
    degrees = {name: getattr(config.parallelism, name) for name in _DEGREES}
    refused = {
        f"parallelism.{name}={value}": (value not in _DEGREES[name], _DIVIDED)
        for name, value in degrees.items()
    } | {
        "compile.enable=True": (
            config.compile.enable,
            "it would wrap the model that the plan runs; leave it out",
        ),
        "training.enable_cpu_offload=True": (
            config.training.enable_cpu_offload,
            "the plan decides where the model's parameters are; leave it out",
        ),
        "override.imports": (
            bool(config.override.imports),
            "they would change the model after it was explored; write them into its configuration",
        ),
        "checkpoint.create_seed_checkpoint=True": (
            config.checkpoint.create_seed_checkpoint,
            "the weights that debug.seed draws are the same under every plan; leave it out",
        ),
        f"comm.mode={config.comm.mode!r}": (
            config.comm.mode != "default",
            "a plan's ranks are those of torchrun; leave it out",
        ),
    }
    for name, (asked, why) in refused.items():
        if asked:
            raise PlanError(f"PlanTitanTrainer cannot follow {name}: {why}")
    training, computed = config.training, load_plan(config.plan).compute_dtype
    if training.dtype == "float32" and training.mixed_precision_param != computed:
        raise PlanError(
            f"the plan computes in {computed}, but training.mixed_precision_param="
            f"{training.mixed_precision_param!r}; pass {computed}, or explore with --dtype "
            f"{training.mixed_precision_param}"
        )
