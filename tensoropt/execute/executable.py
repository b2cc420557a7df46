"""The strategies and engines of each kind of plan (sharded, pipeline, placed).

A plan in any form (an object, a file, a strategy) becomes a :class:`ResolvedPlan`.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.capture import Capture, Mode, capture
from tensoropt.cluster import Cluster
from tensoropt.engine.engine import Engine
from tensoropt.errors import PlanError
from tensoropt.execute.weights import GraphValues, WeightSource
from tensoropt.exploration.rates import device_words, made_for
from tensoropt.pipeline.points import pipelined_strategy
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.placement.points import placed_strategy
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.plan.kinds import PIPELINED, PLACED, SHARDED
from tensoropt.plan.plan import Plan, example_call, load_plan
from tensoropt.question.model_source import load_model
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.strategy import ParallelStrategy, Strategy

ONE_TYPE = "all ranks of a job must be on one type of device; explore without the CPU ranks"
"""The reason and remedy in errors about a plan that mixes GPUs and CPU ranks."""


_OF_PLANS: dict[str, Callable[[Plan, GroupGraph], ParallelStrategy]] = {
    SHARDED.name: Plan.strategy,
    PLACED.name: placed_strategy,
    PIPELINED.name: pipelined_strategy,
}
"""Kind of plan -> function from a plan and the model's graph to the plan's strategy."""
_STRATEGIES: dict[str, type[ParallelStrategy]] = {
    strategy.kind: strategy for strategy in (Strategy, PlacedStrategy, PipelinedStrategy)
}
_ENGINES = {
    Strategy.kind: ("tensoropt.engine.sharded_engine", "ShardedEngine"),
    PlacedStrategy.kind: ("tensoropt.placement.execute.engine", "PlacedEngine"),
    PipelinedStrategy.kind: ("tensoropt.pipeline.execute.engine", "PipelinedEngine"),
}
"""Kind of strategy -> module and name of its engine's class."""


def engine_of(
    strategy: ParallelStrategy,
    values: Mapping[str, torch.Tensor],
    *,
    seed: int = 0,
    device: torch.device | None = None,
) -> Engine:
    """Return the engine that runs a strategy on this rank.

    Args:
        values: whole parameters and buffers by graph name, on any device.
        seed: the seed of dropout.
        device: this rank's compute device; by default that of the values.
    """
    module, name = _ENGINES[strategy.kind]
    # Imported on use: torch.distributed.pipelining is a third of all imports of a rank without a pipeline.
    return getattr(importlib.import_module(module), name)(strategy, values, seed=seed, device=device)


def strategy_from_data(data: Mapping[str, Any], graph: GroupGraph) -> ParallelStrategy:
    """Rebuild a strategy of any kind from the data that :meth:`ParallelStrategy.to_data` returned.

    Raises:
        PlanError: the data belong to another model.
    """
    return _STRATEGIES[data.get("kind", Strategy.kind)].from_data(data, graph)


def strategy_of_plan(plan: Plan, graph: GroupGraph) -> ParallelStrategy:
    """Return a plan's strategy for the graph of its model, with operators in groups.

    Raises:
        PlanError: the plan is for another model.
    """
    return _OF_PLANS[plan.kind.name](plan, graph)


@dataclass(frozen=True)
class Prepared:
    """A captured model with a strategy, before anything is on a rank's device.

    Attributes:
        captured: the captured model.
        strategy: the plan's strategy, for the model's graph.
        values: parameters and buffers by graph name, read on demand.
    """

    captured: Capture
    strategy: ParallelStrategy
    values: GraphValues


@dataclass(frozen=True)
class ResolvedPlan:
    """The data needed to run a plan.

    Attributes:
        devices: the number of devices.
        mode: the mode in which to capture the model.
        compute_dtype: the precision in which to capture the model.
        bind: a function that returns the strategy for a model's grouped graph; PlanError if the plan is for
            another model.
        plan: the plan; None for a bare strategy, which has no example call and no cluster.
    """

    devices: int
    mode: Mode
    compute_dtype: str
    bind: Callable[[GroupGraph], ParallelStrategy]
    plan: Plan | None = None

    @property
    def cluster(self) -> Cluster | None:
        """The plan's cluster; None if unknown."""
        return None if self.plan is None else made_for(self.plan.cluster)

    def example_call(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return an example call (args, kwargs) at the global batch size.

        Raises:
            PlanError: the plan has none.
        """
        if self.plan is None:
            raise PlanError("a strategy has no example call of the model; pass args=... and kwargs=...")
        # Try the recorded call first: building the model only for its inputs takes time and memory.
        if self.plan.model.call is not None:
            return example_call(self.plan.model.call)
        if not self.plan.model.source:
            raise PlanError("the plan has no example call of the model; pass args=... and kwargs=...")
        built = load_model(self.plan.model.source, seed=self.plan.model.seed, batch=self.plan.model.batch)
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
            weights: the model and the source of its weights; buffers are set first, as captures read them.
            args, kwargs: an example call at the global batch size.
            loss: a function from the model's output to the loss, unless the model returns the loss.

        Raises:
            PlanError: the plan is for another model, or a tensor of the model has no value.
            CaptureError: the model cannot be captured.
        """
        weights.fill_buffers()
        # Captured again: plans contain only names, and another model is refused at the first name that
        # differs.
        recapture = functools.partial(
            capture, weights.model, args, kwargs, loss=loss, mode=self.mode, dtype=self.compute_dtype
        )
        captured = recapture()
        try:
            strategy = self.bind(group_operators(refine_graph(captured.graph)))
        except PlanError:
            # A plan made on the meta device does not know the model's stored masks, and accepts them.
            unread = recapture(read_stored=False)
            if unread.graph.operators == captured.graph.operators:
                raise
            captured, strategy = unread, self.bind(group_operators(refine_graph(unread.graph)))
        return Prepared(captured, strategy, GraphValues(captured, weights))

    def warn_of_other_devices(self, device: torch.device) -> None:
        """Warn on rank 0 if the plan was made for GPUs and ``device`` is a CPU, or vice versa.

        Raises:
            PlanError: the plan mixes GPUs and CPU ranks, and ``device`` is a GPU.
        """
        cluster = self.cluster
        if cluster is not None and len(cluster.device_types) > 1 and device.type == "cuda":
            raise PlanError(
                f"the plan is for {device_words(cluster)} of cluster {cluster.name}, but {ONE_TYPE}, "
                "or pass device='cpu'"
            )
        if cluster is None or device.type not in ("cpu", "cuda") or cluster.device_type == device.type:
            return
        # Plans are resolved before joining the job, when only torchrun's variable is set.
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        if rank == 0:
            planned_type = "cuda" if device.type == "cpu" else "cpu"
            warnings.warn(
                f"the plan was made for {device_words(cluster)} of cluster {cluster.name}, but here it "
                f"runs on {device.type}: the memory and time that the plan predicts are for other devices; "
                f"pass device='{planned_type}', or explore again for the devices that run it",
                stacklevel=3,  # the script's call of parallelize
            )


def resolve_plan(plan: str | os.PathLike[str] | Plan | ParallelStrategy) -> ResolvedPlan:
    """Return the data needed to run a plan.

    Args:
        plan: a plan, its file, or a strategy of any kind.

    Raises:
        PlanError: the file is not a plan.
    """
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if not isinstance(plan, Plan) and not hasattr(plan, "to_data"):
        raise PlanError(f"plan must be a plan, its file or a strategy, not a {type(plan).__name__}")
    if isinstance(plan, Plan):
        bind = functools.partial(strategy_of_plan, plan)
        return ResolvedPlan(plan.devices, plan.model.mode, plan.compute_dtype, bind, plan)
    source = plan.graph.atoms.graph
    mode: Mode = "train" if source.training else "inference"
    # By names, as for a plan: the strategy belongs to another capture of the model.
    bind = functools.partial(strategy_from_data, plan.to_data())
    return ResolvedPlan(plan.devices, mode, source.compute_dtype, bind)
