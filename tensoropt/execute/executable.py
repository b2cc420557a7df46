"""Executable forms of strategies. This is the only place that distinguishes the kinds of strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from tensoropt.capture import Capture
from tensoropt.engine.engine import Engine
from tensoropt.engine.parallel_model import ParallelModel
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.engine.sharded_model import ShardedModel
from tensoropt.errors import PlanError
from tensoropt.pipeline.plans import pipelined_strategy
from tensoropt.pipeline.strategy import PipelinedStrategy, pipelined_from_dict, pipelined_to_dict
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.execute.model import PlacedModel
from tensoropt.placement.plans import PlacedStrategy, placed_from_dict, placed_strategy, placed_to_dict
from tensoropt.plan import Plan
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.serialise import strategy_from_dict, strategy_to_dict
from tensoropt.sharding.strategy import Strategy

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
class ShardedExecutable(Executable):
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
class PlacedExecutable(Executable):
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
class PipelinedExecutable(Executable):
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
        return PlacedExecutable(strategy)
    if isinstance(strategy, PipelinedStrategy):
        return PipelinedExecutable(strategy)
    return ShardedExecutable(strategy)


def executable_of_plan(plan: Plan, graph: GroupGraph) -> Executable:
    """Return the strategy of a plan in executable form, for the grouped graph of its model.

    Raises:
        PlanError: the plan is for another model.
    """
    if plan.placed is not None:
        return PlacedExecutable(placed_strategy(plan, graph))
    if plan.pipeline is not None:
        return PipelinedExecutable(pipelined_strategy(plan, graph))
    return ShardedExecutable(plan.strategy(graph))


def executable_from_dict(data: Mapping[str, Any], graph: GroupGraph) -> Executable:
    """Return what :meth:`Executable.to_dict` wrote; its inverse.

    Raises:
        PlanError: the data are for another model.
    """
    if "placed" in data:
        # The one key that distinguishes the kinds in plain data; `PlacedExecutable.to_dict` writes it.
        return PlacedExecutable(placed_from_dict(data["placed"], graph))
    if "pipeline" in data:
        return PipelinedExecutable(pipelined_from_dict(data["pipeline"], graph))
    return ShardedExecutable(strategy_from_dict(data, graph))


def is_spmd(data: Mapping[str, Any]) -> bool:
    """Return :attr:`Executable.spmd` of a strategy, from its plain data alone."""
    if "pipeline" in data:
        return PipelinedExecutable.spmd
    return (PlacedExecutable if "placed" in data else ShardedExecutable).spmd


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
