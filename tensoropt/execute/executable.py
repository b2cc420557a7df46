"""Executable forms of strategies. This is the only place that distinguishes the kinds of strategies.

Plans, in any form in which people pass them, are resolved to what running them requires.
"""

from __future__ import annotations

import functools
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tensoropt.capture import Capture, Mode, capture
from tensoropt.cluster import Cluster
from tensoropt.engine.engine import Engine
from tensoropt.engine.parallel_model import ParallelModel
from tensoropt.engine.sharded_engine import ShardedEngine, ShardedModel
from tensoropt.errors import PlanError
from tensoropt.execute.weights import GraphValues, WeightSource
from tensoropt.exploration.rates import device_words, made_for
from tensoropt.pipeline.points import pipelined_strategy
from tensoropt.pipeline.strategy import PipelinedStrategy, pipelined_from_dict, pipelined_to_dict
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.execute.model import PlacedModel
from tensoropt.placement.points import PlacedStrategy, placed_from_dict, placed_strategy, placed_to_dict
from tensoropt.plan.kinds import PIPELINED, PLACED
from tensoropt.plan.plan import Plan, example_call, load_plan
from tensoropt.question.model_source import load_model
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.strategy import Strategy, strategy_from_dict, strategy_to_dict

if TYPE_CHECKING:
    from tensoropt.pipeline.execute.engine import PipelinedEngine
    from tensoropt.pipeline.execute.model import PipelinedModel


AnyStrategy = Strategy | PlacedStrategy | PipelinedStrategy


class Executable(ABC):
    """A strategy for a captured model, and the way to run it. Each kind of strategy is a subclass.

    Attributes:
        spmd: whether all ranks run the same program, so that what one rank sends and keeps represents all of
            them.
        strategy: the strategy that it runs.
    """

    spmd: ClassVar[bool]
    strategy: AnyStrategy

    @property
    @abstractmethod
    def graph(self) -> GroupGraph:
        """The grouped graph of the model that the strategy is for."""

    @property
    @abstractmethod
    def devices(self) -> int:
        """The number of ranks that it takes."""

    @property
    @abstractmethod
    def micro_batches(self) -> int:
        """The number of pieces in which the global batch is run, one after another."""

    @property
    @abstractmethod
    def mesh_text(self) -> str:
        """The shape of its devices in words."""

    @property
    def schedule(self) -> str | None:
        """The order in which a pipeline runs its micro-batches; None for other kinds."""
        return None

    @abstractmethod
    def engine(
        self, values: Mapping[str, torch.Tensor], *, seed: int = 0, device: torch.device | None = None
    ) -> Engine:
        """Return the engine of this rank.

        Args:
            values: the model's parameters and buffers by graph name, whole, on any device.
            seed: the seed of dropout.
            device: the device that this rank computes on; by default that of the values.
        """

    @abstractmethod
    def parallel_model(
        self,
        model: nn.Module,
        captured: Capture,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ) -> ParallelModel:
        """Return the connection between a user's model and its engine on this rank, not yet installed;
        arguments as in :meth:`engine`."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the strategy as plain data, for other processes; :func:`executable_from_dict` reads it."""

    def for_graph(self, graph: GroupGraph) -> Executable:
        """Return the same strategy for another capture of the same model.

        Raises:
            PlanError: the graph is of another model.
        """
        return executable_from_dict(self.to_dict(), graph)


@dataclass(frozen=True)
class _ShardedExecutable(Executable):
    """A strategy that splits operators over a mesh."""

    spmd = True

    strategy: Strategy

    @property
    def graph(self) -> GroupGraph:
        return self.strategy.graph

    @property
    def devices(self) -> int:
        return prod(self.strategy.mesh[1:])

    @property
    def micro_batches(self) -> int:
        return self.strategy.micro_batches

    @property
    def mesh_text(self) -> str:
        return "x".join(map(str, self.strategy.mesh[1:])) or "1"

    def engine(
        self, values: Mapping[str, torch.Tensor], *, seed: int = 0, device: torch.device | None = None
    ) -> ShardedEngine:
        return ShardedEngine(self.strategy, values, seed=seed, device=device)

    def parallel_model(
        self,
        model: nn.Module,
        captured: Capture,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ) -> ShardedModel:
        return ShardedModel(model, captured, self.strategy, values, device, seed)

    def to_dict(self) -> dict[str, Any]:
        return strategy_to_dict(self.strategy)


@dataclass(frozen=True)
class _PlacedExecutable(Executable):
    """A strategy that places each operator on one device."""

    spmd = False

    strategy: PlacedStrategy

    @property
    def graph(self) -> GroupGraph:
        return self.strategy.graph.groups

    @property
    def devices(self) -> int:
        return self.strategy.devices

    @property
    def micro_batches(self) -> int:
        return self.strategy.micro_batches

    @property
    def mesh_text(self) -> str:
        return f"placed on {self.strategy.devices}"

    def engine(
        self, values: Mapping[str, torch.Tensor], *, seed: int = 0, device: torch.device | None = None
    ) -> PlacedEngine:
        return PlacedEngine(self.strategy, values, seed=seed, device=device)

    def parallel_model(
        self,
        model: nn.Module,
        captured: Capture,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ) -> PlacedModel:
        return PlacedModel(model, captured, self.strategy, values, device, seed)

    def to_dict(self) -> dict[str, Any]:
        return {"placed": placed_to_dict(self.strategy)}


@dataclass(frozen=True)
class _PipelinedExecutable(Executable):
    """A strategy that cuts the model into stages."""

    spmd = False

    strategy: PipelinedStrategy

    @property
    def graph(self) -> GroupGraph:
        return self.strategy.graph

    @property
    def devices(self) -> int:
        return self.strategy.devices

    @property
    def micro_batches(self) -> int:
        return self.strategy.micro_batches

    @property
    def mesh_text(self) -> str:
        axes = [str(size) for size in self.strategy.mesh[2:] if size > 1]
        return "x".join([f"pp{self.strategy.places}", *axes])

    @property
    def schedule(self) -> str | None:
        return self.strategy.schedule

    def engine(
        self, values: Mapping[str, torch.Tensor], *, seed: int = 0, device: torch.device | None = None
    ) -> PipelinedEngine:
        # With torch.distributed.pipelining, a third of all imports of a rank without a pipeline.
        from tensoropt.pipeline.execute.engine import PipelinedEngine

        return PipelinedEngine(self.strategy, values, seed=seed, device=device)

    def parallel_model(
        self,
        model: nn.Module,
        captured: Capture,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ) -> PipelinedModel:
        from tensoropt.pipeline.execute.model import PipelinedModel

        return PipelinedModel(model, captured, self.strategy, values, device, seed)

    def to_dict(self) -> dict[str, Any]:
        return {"pipeline": pipelined_to_dict(self.strategy)}


def executable_of(strategy: AnyStrategy) -> Executable:
    """Return a strategy of any kind in executable form."""
    if isinstance(strategy, PlacedStrategy):
        return _PlacedExecutable(strategy)
    if isinstance(strategy, PipelinedStrategy):
        return _PipelinedExecutable(strategy)
    return _ShardedExecutable(strategy)


def executable_of_plan(plan: Plan, graph: GroupGraph) -> Executable:
    """Return the strategy of a plan in executable form, for the grouped graph of its model.

    Raises:
        PlanError: the plan is for another model.
    """
    if plan.kind is PLACED:
        return _PlacedExecutable(placed_strategy(plan, graph))
    if plan.kind is PIPELINED:
        return _PipelinedExecutable(pipelined_strategy(plan, graph))
    return _ShardedExecutable(plan.strategy(graph))


def executable_from_dict(data: Mapping[str, Any], graph: GroupGraph) -> Executable:
    """Return what :meth:`Executable.to_dict` wrote; its inverse.

    Raises:
        PlanError: the data are for another model.
    """
    if "placed" in data:
        # The one key that distinguishes the kinds in plain data; `PlacedExecutable.to_dict` writes it.
        return _PlacedExecutable(placed_from_dict(data["placed"], graph))
    if "pipeline" in data:
        return _PipelinedExecutable(pipelined_from_dict(data["pipeline"], graph))
    return _ShardedExecutable(strategy_from_dict(data, graph))


def is_spmd(data: Mapping[str, Any]) -> bool:
    """Return :attr:`Executable.spmd` of a strategy, from its plain data alone."""
    if "pipeline" in data:
        return _PipelinedExecutable.spmd
    return (_PlacedExecutable if "placed" in data else _ShardedExecutable).spmd


def devices_in(data: Mapping[str, Any]) -> int:
    """Return the number of ranks that a strategy takes, from its plain data alone.

    Raises:
        PlanError: the data do not say.
    """
    if "placed" in data:
        return len(data["placed"]["forward"])
    if "pipeline" in data:
        return int(data["pipeline"]["places"]) * prod(data["pipeline"]["stages"][0]["mesh"][1:])
    mesh = data.get("mesh")
    if not isinstance(mesh, Sequence) or not mesh:
        raise PlanError("the plan has no mesh")
    # The first entry counts micro-batches, which take time and no devices.
    return prod(mesh[1:])


@dataclass(frozen=True)
class Prepared:
    """A model ready to be run: nothing is on a rank's device yet.

    Attributes:
        captured: the model.
        executable: the plan in executable form, for the model's graph.
        values: the values of its parameters and buffers by graph name, read when they are needed.
    """

    captured: Capture
    executable: Executable
    values: GraphValues


@dataclass(frozen=True)
class ResolvedPlan:
    """The requirements for running a plan, in whatever form the plan was passed.

    Attributes:
        devices: the number of devices that it takes.
        mode: the mode that the model has to be captured for.
        compute_dtype: the precision that it has to be captured in.
        bind: returns the executable for a grouped graph; raises :class:`PlanError` if the plan is for another
            model.
        plan: the plan that all this comes from; None for a bare strategy, which says neither how the model is
            called nor what devices it is for.
    """

    devices: int
    mode: Mode
    compute_dtype: str
    bind: Callable[[GroupGraph], Executable]
    plan: Plan | None = None

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that the plan was made for; None if it does not say."""
        return None if self.plan is None else made_for(self.plan.cluster)

    def example_call(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return (args, kwargs) of a call of the model at the global batch size.

        Raises:
            PlanError: the plan does not say.
        """
        if self.plan is None:
            raise PlanError("a strategy does not say how the model is called; pass args=... and kwargs=...")
        # Try the recorded call first: building the model once more only for its inputs takes time and memory.
        if self.plan.model.call is not None:
            return example_call(self.plan.model.call)
        if not self.plan.model_source:
            raise PlanError("the plan does not say how the model is called; pass args=... and kwargs=...")
        built = load_model(self.plan.model_source, seed=self.plan.seed, batch=self.plan.model.batch)
        return built.args, built.kwargs

    def prepare(
        self,
        weights: WeightSource,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> Prepared:
        """Capture the model of ``weights`` for the plan.

        Args:
            weights: the source of values for the model's buffers, which the capture folds into constants.
            args, kwargs: an example call at the global batch size.
            loss: maps the model's output to the loss, if the model does not return it.

        Raises:
            PlanError: the plan is for another model, or something of the model has no value.
            CaptureError: the model cannot be captured.
        """
        weights.fill_buffers()
        # Captured anew: plans have names only, and a model that is another one is refused at the first name
        # that does not fit.
        recapture = functools.partial(
            capture, weights.model, args, kwargs, loss=loss, mode=self.mode, dtype=self.compute_dtype
        )
        captured = recapture()
        try:
            executable = self.bind(group_operators(refine_graph(captured.graph)))
        except PlanError:
            # A plan made on the meta device does not know masks that the model stores, and takes them as they
            # are.
            unread = recapture(read_stored=False)
            if unread.graph.operators == captured.graph.operators:
                raise
            captured, executable = unread, self.bind(group_operators(refine_graph(unread.graph)))
        return Prepared(captured, executable, GraphValues(captured, weights))

    def warn_of_other_devices(self, device: torch.device) -> None:
        """Warn on rank 0 if the plan was made for GPUs and ``device`` is a CPU, or the other way round."""
        cluster = self.cluster
        if cluster is None or device.type not in ("cpu", "cuda") or cluster.device_type == device.type:
            return
        # Plans are resolved before the job is joined, so that torchrun's variable may be all there is.
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        if rank == 0:
            planned_type = "cuda" if device.type == "cpu" else "cpu"
            warnings.warn(
                f"the plan was made for {device_words(cluster)} of cluster {cluster.name}, but here it "
                f"runs on {device.type}: the memory and time that the plan predicts are for other devices; "
                f"pass device='{planned_type}', or explore again for the devices that run it",
                stacklevel=3,  # the script's call of parallelize
            )


def resolve_plan(plan: str | os.PathLike[str] | Plan | AnyStrategy) -> ResolvedPlan:
    """Return the requirements for running ``plan``.

    Args:
        plan: a plan, its file, or a strategy of any kind.

    Raises:
        PlanError: the file is not a plan's.
    """
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if isinstance(plan, Plan):
        bind = functools.partial(executable_of_plan, plan)
        return ResolvedPlan(plan.devices, plan.model.mode, plan.compute_dtype, bind, plan)
    executable = executable_of(plan)
    source = executable.graph.atoms.graph
    mode: Mode = "train" if source.training else "inference"
    # By names, as for a plan: the strategy belongs to another capture of the model than the script's.
    return ResolvedPlan(executable.devices, mode, source.compute_dtype, executable.for_graph)
