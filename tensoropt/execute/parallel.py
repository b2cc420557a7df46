"""``parallelize``: a user's own model, run by a plan, inside a user's own training script.

The model stays the object it was. Its parameters become DTensors over the engine's shards, its forward
becomes the engine's; optimizers, gradient clipping, ``state_dict`` and distributed checkpoints see
ordinary (distributed) parameters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tensoropt.capture import Capture, Mode, capture
from tensoropt.engine.engine import Engine
from tensoropt.engine.models import model_values
from tensoropt.engine.parallel_model import ATTRIBUTE, ParallelModel
from tensoropt.engine.parameters import as_dtensor
from tensoropt.engine.runtime import leave_job
from tensoropt.errors import PlanError
from tensoropt.graph import OperatorGraph
from tensoropt.placement.execute.parallel import PlacedModel
from tensoropt.placement.plans import (
    PlacedStrategy,
    placed_from_dict,
    placed_strategy,
    placed_to_dict,
)
from tensoropt.plan import Plan, load_model, load_plan
from tensoropt.plan.call import example_call
from tensoropt.plan.made_for import device_words, made_for
from tensoropt.ranks.pinning import pin_process, unpin_process
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.serialise import strategy_from_dict, strategy_to_dict
from tensoropt.sharding.strategy import Strategy

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    plan: str | os.PathLike[str] | Plan | Strategy | PlacedStrategy,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    as_measured: bool = True,
) -> M:
    """Make ``model`` run by ``plan`` on the ranks of this job, in place.

    Every rank calls it with the same weights, and later passes the same global batch; each computes its
    part. In training the model returns what it returned before, holding the loss only. ``model.eval()``
    computes without dropout and with running statistics.

    Args:
        model: on the CPU or on this rank's GPU, with the weights to start from (rank 0's are not sent to the
            others).
        plan: a plan, its file, or a strategy. A placed plan is run by one process per device, or without a
            job by this process alone on as many GPUs (or on the CPU), wherever the model is.
        args, kwargs: an example call at the global batch size; by default zeros of the shapes the plan was
            made for.
        loss: maps the model's output to the loss, where the model does not return it; the model then
            returns the loss.
        seed: of dropout.
        as_measured: in a torchrun job on CPUs, run this process as CPU ranks are measured, so that a step
            takes what the plan predicts: PyTorch with one thread, the batch scheduling class, and a core of
            its own where there are enough, which workers of a data loader share. False leaves all that to
            the script.

    Returns:
        ``model``. Create the optimizer afterwards: its parameters are new.

    Warns:
        UserWarning: the plan was made for GPUs and the model is on the CPU, or the other way round; it runs,
            but what the plan predicts is not for these devices. Only rank 0 of a job says so.

    Raises:
        PlanError: the plan is for another model, or for another number of ranks.
        CaptureError: the model cannot be captured.
    """
    if hasattr(model, ATTRIBUTE):
        raise PlanError("this model is parallelized already; build it anew for another plan")
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if args is None and kwargs is None:
        args, kwargs = _example(plan)
    mode: Mode
    if isinstance(plan, Plan):
        mode, dtype = plan.model.mode, plan.compute_dtype
    else:
        mode, dtype = ("train" if _graph(plan).training else "inference"), _graph(plan).compute_dtype
    captured = capture(model, args or (), kwargs, loss=loss, mode=mode, dtype=dtype)
    graph = group_operators(refine_graph(captured.graph))
    strategy = _strategy(plan, graph)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(plan, Plan):
        _warn_of_other_devices(plan, device)
    if as_measured and device.type == "cpu":
        pin_process()  # before gloo starts threads, which take it over
    _join_job(device)
    if isinstance(strategy, PlacedStrategy):
        PlacedModel(model, captured, strategy, seed).install()
    else:
        _Sharded(model, captured, strategy, seed).install()
    return model


def _warn_of_other_devices(plan: Plan, device: torch.device) -> None:
    cluster = made_for(plan.cluster)
    if cluster is None or device.type not in ("cpu", "cuda") or cluster.device_type == device.type:
        return
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        remedy = "move the model to this rank's GPU first" if device.type == "cpu" else "leave it on the CPU"
        warnings.warn(
            f"the plan was made for {device_words(cluster)} of cluster {cluster.name}, but the model is on "
            f"{device.type}: it runs, but the memory and time that the plan predicts are for other devices; "
            f"{remedy}, or explore again for the devices that run it",
            stacklevel=3,
        )


def _strategy(plan: Plan | Strategy | PlacedStrategy, graph: GroupGraph) -> Strategy | PlacedStrategy:
    """What a plan says, for the model as it is here."""
    if isinstance(plan, PlacedStrategy):
        return placed_from_dict(placed_to_dict(plan), graph)
    if isinstance(plan, Strategy):
        return strategy_from_dict(strategy_to_dict(plan), graph)
    return strategy_of(plan, graph)


def strategy_of(plan: Plan, graph: GroupGraph) -> Strategy | PlacedStrategy:
    """The strategy of a plan of either kind.

    Raises:
        PlanError: the plan is for another model.
    """
    if plan.placed is not None:
        return placed_strategy(plan, graph)
    strategy: Strategy = plan.strategy(graph)
    return strategy


def _graph(strategy: Strategy | PlacedStrategy) -> OperatorGraph:
    groups = strategy.graph.groups if isinstance(strategy, PlacedStrategy) else strategy.graph
    return groups.atoms.graph


def _example(plan: Plan | Strategy | PlacedStrategy) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not isinstance(plan, Plan):
        raise PlanError("a strategy does not say how the model is called; pass args=... and kwargs=...")
    if plan.model.call is not None:
        return example_call(plan.model.call)
    if not plan.model_source:
        raise PlanError("the plan does not say how the model is called; pass args=... and kwargs=...")
    built = load_model(plan.model_source, seed=plan.seed, batch=plan.model.batch)
    return built.args, built.kwargs


def _join_job(device: torch.device) -> None:
    """Initialise the process group of a torchrun job, as ``init_device_mesh`` would."""
    if dist.is_initialized() or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    atexit.register(leave_job)


def shutdown() -> None:
    """Wait for the other ranks and leave the job; the last line of a script that parallelizes models.

    A group that :func:`parallelize` made is left at exit anyway; one that the script made itself is not.
    Parallelized models cannot be run afterwards.
    """
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # a rank that failed is not waited for
            dist.barrier()
    leave_job()
    unpin_process()


class _Sharded(ParallelModel):
    """What ties a model to its sharded plan."""

    def __init__(self, model: nn.Module, captured: Capture, strategy: Strategy, seed: int):
        self.strategy = strategy
        self.engine: Engine = Engine(strategy, model_values(captured), seed=seed)
        mesh: DeviceMesh | None = None
        if self.engine.runtime.distributed:
            names = tuple(f"axis{i}" for i in range(1, len(strategy.mesh)))
            mesh = init_device_mesh(self.engine.runtime.device.type, strategy.mesh[1:], mesh_dim_names=names)
        super().__init__(model, captured, strategy.graph.atoms.graph, mesh)

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return local
        layout = self.strategy.stored[name]
        return as_dtensor(local, self.strategy.atoms(name), layout, self.mesh, self.engine.runtime)

    def own_shape(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """A value that lies like the parameter ``key``, in the model's own shape.

        A fused projection split on heads is stored as a DTensor of its unflattened view, whose shards are
        no slices of the flat shape: it is gathered.
        """
        shape = self.shapes[key]
        if tuple(value.shape) == shape or not isinstance(value, DTensor):
            return value
        whole = value.full_tensor().detach().view(shape)
        mesh = value.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def stored(self, key: str, value: torch.Tensor) -> torch.Tensor:
        name = self.names[key]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        local = self.engine.shards.shard(name, whole.detach().reshape(self.shapes[key]))
        return self.shown(name, local)

    def lies_right(self, key: str, value: torch.Tensor) -> bool:
        parameter = self.parameters[self.names[key]]
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and value.shape == parameter.shape
            and value.placements == parameter.placements
            and value.device_mesh == parameter.device_mesh
        )


def parallel_of(model: nn.Module) -> ParallelModel:
    """What :func:`parallelize` attached to a model."""
    found = getattr(model, ATTRIBUTE, None)
    if not isinstance(found, ParallelModel):
        raise PlanError("this model is not parallelized; call tensoropt.parallelize(model, plan) first")
    return found
