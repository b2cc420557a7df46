"""The kinds of strategies and the engines that run them. This is the only place that distinguishes them.

Plans, in any form in which people pass them, are resolved to what running them requires.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from tensoropt.plan.kinds import PIPELINED, PLACED, SHARDED, PlanKind
from tensoropt.plan.plan import Plan, example_call, load_plan
from tensoropt.question.model_source import load_model
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.strategy import ParallelStrategy, Strategy

ONE_TYPE = "the ranks of a job are on devices of one type; explore without the CPU ranks"
"""Why a plan for GPUs with CPU ranks beside them does not run on these, with a remedy."""


class _Kind(NamedTuple):
    """A kind of plans, the class of their strategies, what reads one from a plan, and the module and name of
    the engine that runs it."""

    plans: PlanKind
    strategy: type[ParallelStrategy]
    of_plan: Callable[[Plan, GroupGraph], ParallelStrategy]
    engine: tuple[str, str]


_KINDS = (
    _Kind(SHARDED, Strategy, Plan.strategy, ("tensoropt.engine.sharded_engine", "ShardedEngine")),
    _Kind(PLACED, PlacedStrategy, placed_strategy, ("tensoropt.placement.execute.engine", "PlacedEngine")),
    _Kind(
        PIPELINED,
        PipelinedStrategy,
        pipelined_strategy,
        ("tensoropt.pipeline.execute.engine", "PipelinedEngine"),
    ),
)
_OF_PLANS = {kind.plans.name: kind for kind in _KINDS}
_OF_STRATEGIES = {kind.strategy.kind: kind for kind in _KINDS}


def engine_of(
    strategy: ParallelStrategy,
    values: Mapping[str, torch.Tensor],
    *,
    seed: int = 0,
    device: torch.device | None = None,
) -> Engine:
    """Return the engine that runs a strategy on this rank.

    Args:
        values: the model's parameters and buffers by graph name, whole, on any device.
        seed: the seed of dropout.
        device: the device that this rank computes on; by default that of the values.
    """
    module, name = _OF_STRATEGIES[strategy.kind].engine
    # Imported where it is used: torch.distributed.pipelining is a third of all imports of a rank without a
    # pipeline.
    engine: Engine = getattr(importlib.import_module(module), name)(
        strategy, values, seed=seed, device=device
    )
    return engine


def strategy_class(data: Mapping[str, Any]) -> type[ParallelStrategy]:
    """Return the class of a strategy in plain data (:meth:`ParallelStrategy.to_data`), which says how
    many ranks there are, and which of them run one program."""
    return _OF_STRATEGIES[data.get("kind", Strategy.kind)].strategy


def strategy_from_data(data: Mapping[str, Any], graph: GroupGraph) -> ParallelStrategy:
    """Return the strategy of any kind that :meth:`ParallelStrategy.to_data` wrote; its inverse.

    Raises:
        PlanError: the data are for another model.
    """
    return strategy_class(data).from_data(data, graph)


def strategy_of_plan(plan: Plan, graph: GroupGraph) -> ParallelStrategy:
    """Return the strategy of a plan, for the grouped graph of its model.

    Raises:
        PlanError: the plan is for another model.
    """
    return _OF_PLANS[plan.kind.name].of_plan(plan, graph)


@dataclass(frozen=True)
class Prepared:
    """A model ready to be run: nothing is on a rank's device yet.

    Attributes:
        captured: the model.
        strategy: the plan's strategy, for the model's graph.
        values: the values of its parameters and buffers by graph name, read when they are needed.
    """

    captured: Capture
    strategy: ParallelStrategy
    values: GraphValues


@dataclass(frozen=True)
class ResolvedPlan:
    """The requirements for running a plan, in whatever form the plan was passed.

    Attributes:
        devices: the number of devices that it takes.
        mode: the mode that the model has to be captured for.
        compute_dtype: the precision that it has to be captured in.
        bind: returns the strategy for a grouped graph; raises :class:`PlanError` if the plan is for another
            model.
        plan: the plan that all this comes from; None for a bare strategy, which says neither how the model is
            called nor what devices it is for.
    """

    devices: int
    mode: Mode
    compute_dtype: str
    bind: Callable[[GroupGraph], ParallelStrategy]
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
            strategy = self.bind(group_operators(refine_graph(captured.graph)))
        except PlanError:
            # A plan made on the meta device does not know masks that the model stores, and takes them as they
            # are.
            unread = recapture(read_stored=False)
            if unread.graph.operators == captured.graph.operators:
                raise
            captured, strategy = unread, self.bind(group_operators(refine_graph(unread.graph)))
        return Prepared(captured, strategy, GraphValues(captured, weights))

    def warn_of_other_devices(self, device: torch.device) -> None:
        """Warn on rank 0 if the plan was made for GPUs and ``device`` is a CPU, or the other way round.

        Raises:
            PlanError: the plan was made for CPU ranks beside GPUs, and ``device`` is a GPU.
        """
        cluster = self.cluster
        if cluster is not None and len(cluster.device_types) > 1 and device.type == "cuda":
            raise PlanError(
                f"the plan is for {device_words(cluster)} of cluster {cluster.name}, but {ONE_TYPE}, "
                "or pass device='cpu'"
            )
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


def resolve_plan(plan: str | os.PathLike[str] | Plan | ParallelStrategy) -> ResolvedPlan:
    """Return the requirements for running ``plan``.

    Args:
        plan: a plan, its file, or a strategy of any kind.

    Raises:
        PlanError: the file is not a plan's.
    """
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if not isinstance(plan, Plan) and not hasattr(plan, "to_data"):
        raise PlanError(f"plan is a plan, its file or a strategy, not a {type(plan).__name__}")
    if isinstance(plan, Plan):
        bind = functools.partial(strategy_of_plan, plan)
        return ResolvedPlan(plan.devices, plan.model.mode, plan.compute_dtype, bind, plan)
    source = plan.graph.atoms.graph
    mode: Mode = "train" if source.training else "inference"
    # By names, as for a plan: the strategy belongs to another capture of the model than the script's.
    bind = functools.partial(strategy_from_data, plan.to_data())
    return ResolvedPlan(plan.devices, mode, source.compute_dtype, bind)
