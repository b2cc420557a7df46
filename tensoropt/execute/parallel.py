"""``parallelize``: a user's own model, run by a plan, inside a user's own training script.

The model stays the object it was. Its parameters become DTensors over the engine's shards, its forward
becomes the engine's; optimizers, gradient clipping, ``state_dict`` and distributed checkpoints see
ordinary (distributed) parameters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tensoropt.capture import Capture, capture
from tensoropt.errors import PlanError
from tensoropt.execute.calls import CallingConvention
from tensoropt.execute.engine import Engine
from tensoropt.execute.models import model_values
from tensoropt.execute.parameters import as_dtensor
from tensoropt.execute.runtime import leave_job
from tensoropt.plan import Plan, load_model, load_plan
from tensoropt.plan.call import example_call
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators
from tensoropt.sharding.serialise import strategy_from_dict, strategy_to_dict
from tensoropt.sharding.strategy import Strategy

M = TypeVar("M", bound=nn.Module)
ATTRIBUTE = "_tensoropt"


def parallelize(
    model: M,
    plan: str | os.PathLike[str] | Plan | Strategy,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
) -> M:
    """Make ``model`` run by ``plan`` on the ranks of this job, in place.

    Every rank calls it with the same weights, and later passes the same global batch; each computes its
    part. In training the model returns what it returned before, holding the loss only. ``model.eval()``
    computes without dropout and with running statistics.

    Args:
        model: on the CPU or on this rank's GPU, with the weights to start from (rank 0's are not sent to the
            others).
        plan: a plan, its file, or a strategy.
        args, kwargs: an example call at the global batch size; by default zeros of the shapes the plan was
            made for.
        loss: maps the model's output to the loss, where the model does not return it; the model then
            returns the loss.
        seed: of dropout.

    Returns:
        ``model``. Create the optimizer afterwards: its parameters are new.

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
    mode = plan.model.mode if isinstance(plan, Plan) else _mode(plan)
    dtype = plan.compute_dtype if isinstance(plan, Plan) else plan.graph.atoms.graph.compute_dtype
    captured = capture(model, args or (), kwargs, loss=loss, mode=mode, dtype=dtype)
    graph = group_operators(refine_graph(captured.graph))
    if isinstance(plan, Plan):
        strategy = plan.strategy(graph)
    else:
        strategy = strategy_from_dict(strategy_to_dict(plan), graph)
    _join_job(next((p.device for p in model.parameters()), torch.device("cpu")))
    _Parallel(model, captured, strategy, seed).install()
    return model


def _mode(strategy: Strategy) -> Any:
    return "train" if strategy.graph.atoms.graph.training else "inference"


def _example(plan: Plan | Strategy) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
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


class _Parallel:
    """What ties a model to its engine; found at ``model._tensoropt``."""

    def __init__(self, model: nn.Module, captured: Capture, strategy: Strategy, seed: int):
        self.model = model
        self.captured = captured
        self.strategy = strategy
        self.source = strategy.graph.atoms.graph
        self.convention = CallingConvention(model.forward, captured)
        self.engine = Engine(strategy, model_values(captured), seed=seed)
        self.mesh: DeviceMesh | None = None
        if self.engine.runtime.distributed:
            names = tuple(f"axis{i}" for i in range(1, len(strategy.mesh)))
            self.mesh = init_device_mesh(
                self.engine.runtime.device.type, strategy.mesh[1:], mesh_dim_names=names
            )
        self.names: dict[str, str] = {}  # state-dict key -> graph name
        self.shapes: dict[str, tuple[int, ...]] = {}  # state-dict key -> the model's own shape

    def install(self) -> None:
        parameters = self._replace_parameters()
        self.engine.shards.book.show_as(parameters, self.shown)
        self._replace_buffers()
        self.model.forward = self.forward
        self.model.register_state_dict_post_hook(lambda *given: self._to_own_shapes(*given))
        self.model.register_load_state_dict_pre_hook(lambda *given: self._to_shards(*given))
        object.__setattr__(self.model, ATTRIBUTE, self)

    # -- parameters -------------------------------------------------------------------------------

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A local shard as a user sees it."""
        if self.mesh is None:
            return local
        layout = self.strategy.stored[name]
        return as_dtensor(local, self.strategy.atoms(name), layout, self.mesh, self.engine.runtime)

    def _replace_parameters(self) -> dict[str, nn.Parameter]:
        made: dict[str, nn.Parameter] = {}
        for tensor in self.source.parameters:
            key = str(tensor.key)
            local = self.engine.shards.leaves[tensor.name].detach()
            made[tensor.name] = nn.Parameter(self.shown(tensor.name, local), tensor.requires_grad)
            keys = [key, *(alias for alias, main in self.source.aliases.items() if main == key)]
            for each in keys:
                owner, attribute = _owner(self.model, each)
                owner._parameters[attribute] = made[tensor.name]
                self.names[each], self.shapes[each] = tensor.name, tensor.shape
        return made

    def _replace_buffers(self) -> None:
        """Buffers of the model and of the engine are the same tensors."""
        for name, value in self.engine.buffers.items():
            owner, attribute = _owner(self.model, str(self.source.tensors[name].key))
            if attribute in owner._buffers:
                owner._buffers[attribute] = value

    # -- calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.convention.inputs(args, kwargs)
        outputs = self.engine(*inputs, evaluating=not self.model.training)
        if self.engine.lowered.mutations:
            self._replace_buffers()
        if self.captured.returned is not None:
            return self.captured.returned.rebuild(outputs[0])
        return torch.utils._pytree.tree_unflatten(list(outputs), self.captured.out_spec)

    # -- state dicts ------------------------------------------------------------------------------

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
        """A whole value, or any DTensor of it, laid out like the parameter ``key``."""
        name = self.names[key]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        local = self.engine.shards.shard(name, whole.detach().reshape(self.shapes[key]))
        return self.shown(name, local)

    def parameter_keys(self) -> dict[str, nn.Parameter]:
        """State-dict keys of the trained parameters, without aliases."""
        found = {}
        for tensor in self.source.parameters:
            owner, attribute = _owner(self.model, str(tensor.key))
            parameter = owner._parameters[attribute]
            assert parameter is not None
            found[str(tensor.key)] = parameter
        return found

    def _to_own_shapes(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        for key in self.names:
            if prefix + key in state:
                state[prefix + key] = self.own_shape(key, state[prefix + key])

    def _to_shards(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in self.names:
            value = state.get(prefix + key)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == self.shapes[key]:
                if self._lies_right(key, value):
                    continue
                state[prefix + key] = self.stored(key, value)

    def _lies_right(self, key: str, value: torch.Tensor) -> bool:
        owner, attribute = _owner(self.model, key)
        parameter = owner._parameters[attribute]
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and value.shape == parameter.shape
            and value.placements == parameter.placements
            and value.device_mesh == parameter.device_mesh
        )


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, attribute = key.rpartition(".")
    return model.get_submodule(path), attribute


def parallel_of(model: nn.Module) -> _Parallel:
    """What :func:`parallelize` attached to a model."""
    found = getattr(model, ATTRIBUTE, None)
    if not isinstance(found, _Parallel):
        raise PlanError("this model is not parallelized; call tensoropt.parallelize(model, plan) first")
    return found
