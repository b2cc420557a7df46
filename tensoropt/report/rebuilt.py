"""Functions that simulate a saved plan of any kind again, at the same or at other costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensoropt.cluster import Cluster, DeviceKind, Mesh
from tensoropt.costs.prices import ClusterCosts
from tensoropt.costs.source import real_shape
from tensoropt.errors import ClusterError
from tensoropt.evaluation.evaluate import evaluate_on
from tensoropt.exploration.exploration import Exploration
from tensoropt.pipeline.costs import job_meshes, kinds_at
from tensoropt.pipeline.evaluate import PipelineEvaluation, evaluate_pipeline_on, stage_works
from tensoropt.pipeline.points import pipelined_strategy
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.placement.points import placed_strategy
from tensoropt.placement.prices import PlacedPrices
from tensoropt.placement.simulate import SimulatedPlacement, simulate_placement
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.plan.kinds import PIPELINED, PLACED, SHARDED
from tensoropt.plan.plan import Plan
from tensoropt.plan.recorded import CostRecorder, Recorded, RecordedCosts, mesh_of
from tensoropt.profiling.workload import Workload, workload
from tensoropt.question.settings import Settings
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.units import counted


class SimulatedStep(NamedTuple):
    """The memory of the fullest device in bytes, and the duration of a step in seconds."""

    memory_bytes: float
    time_s: float


_Work = tuple[tuple[DeviceKind, ...], Workload]
"""The device kinds of a pipeline rank or device, and the computation of one of its processes for a group of
operators, or a piece of a group, in a micro-batch."""


@dataclass(frozen=True)
class StrategyOnMesh:
    """The strategy of a sharded plan on a mesh of a cluster; the subclasses are for other kinds of plans."""

    strategy: Any
    mesh: Mesh

    @staticmethod
    def read(plan: Plan, graph: GroupGraph) -> Any:
        """Return the strategy of a plan for its model's graph of operator groups."""
        return Strategy.from_data(plan.strategy_data(), graph)

    @staticmethod
    def meshes(cluster: Cluster, shape: tuple[int, ...]) -> Sequence[Mesh]:
        """Return meshes for such strategies, among them those of this shape that the cluster has."""
        return cluster.meshes(max(len(shape), 1))

    def works(self, cluster: Cluster) -> Iterator[_Work]:
        """Yield one rank's computation for each group of operators, with the device kinds that run it."""
        kinds = kinds_at(cluster, self.strategy.places)
        for number, works in enumerate(stage_works(self.strategy)):
            for work in works.values():
                yield kinds[self.strategy.place_of(number)], work

    def simulated(self, costs: ClusterCosts) -> SimulatedStep:
        metrics = self.evaluated(costs).metrics
        return SimulatedStep(float(metrics.memory_bytes[0]), float(metrics.time_s[0]))

    def evaluated(self, costs: ClusterCosts) -> Any:
        """Return the simulated step at these costs; its class depends on the kind of plan."""
        return evaluate_on(self.strategy, self.mesh, costs)

    def record(self, recorder: CostRecorder) -> None:
        """Record all costs that the simulation of the step uses."""
        recorder.add_links(self.mesh)
        works: dict[tuple[DeviceKind, ...], list[Workload]] = {}
        for kinds, work in self.works(recorder.costs.cluster):
            works.setdefault(kinds, []).append(work)
        for kinds, of_kinds in works.items():
            recorder.add_at_place(kinds, of_kinds)


class _PipelineOnMesh(StrategyOnMesh):
    @staticmethod
    def read(plan: Plan, graph: GroupGraph) -> PipelinedStrategy:
        return pipelined_strategy(plan, graph)

    @staticmethod
    def meshes(cluster: Cluster, shape: tuple[int, ...]) -> Sequence[Mesh]:
        try:
            return job_meshes(cluster, shape[0], max(len(shape) - 1, 1))
        except ClusterError:
            return ()

    def simulated(self, costs: ClusterCosts) -> SimulatedStep:
        evaluated = self.evaluated(costs)
        return SimulatedStep(evaluated.memory_bytes, evaluated.time_s)

    def evaluated(self, costs: ClusterCosts) -> PipelineEvaluation:
        return evaluate_pipeline_on(self.strategy, self.mesh, costs)


class _PlacementOnDevices(StrategyOnMesh):
    @staticmethod
    def read(plan: Plan, graph: GroupGraph) -> PlacedStrategy:
        return placed_strategy(plan, graph)

    @staticmethod
    def meshes(cluster: Cluster, shape: tuple[int, ...]) -> Sequence[Mesh]:
        return cluster.meshes(1)

    def works(self, cluster: Cluster) -> Iterator[_Work]:
        operators = self.strategy.placed_graph.operators
        for op, device in zip(operators, self.strategy.placement.device, strict=True):
            if op.group is not None and op.configuration is not None:
                work = workload(self.strategy.graph, op.configuration, op.mesh, contiguous=True)
                yield (cluster.devices[device],), work

    def simulated(self, costs: ClusterCosts) -> SimulatedStep:
        placement = self.evaluated(costs)
        beside_bytes = sum(placement.problem.devices.terms.values())
        return SimulatedStep(placement.memory_bytes + beside_bytes, placement.time_s)

    def evaluated(self, costs: ClusterCosts) -> SimulatedPlacement:
        graph = self.strategy.placed_graph
        prices = PlacedPrices(self.strategy.graph, costs.cluster, costs)
        problem = prices.price(graph.splits, graph.micro_batches).problem
        return simulate_placement(problem, self.strategy.placement)

    def record(self, recorder: CostRecorder) -> None:
        recorder.add_links(self.mesh)
        recorder.add_on_devices(work for _, work in self.works(recorder.costs.cluster))


_KINDS: Mapping[str, type[StrategyOnMesh]] = {
    SHARDED.name: StrategyOnMesh,
    PIPELINED.name: _PipelineOnMesh,
    PLACED.name: _PlacementOnDevices,
}


def strategy_on(plan: Plan, graph: GroupGraph, cluster: Cluster) -> StrategyOnMesh:
    """Return the strategy of a plan for its model's graph of operator groups, on a mesh of a cluster.

    Raises:
        PlanError: the plan is for another model.
        ClusterError: the cluster has no such mesh.
    """
    kind, shape = _KINDS[plan.kind.name], tuple(size for size in plan.mesh.shape if size > 1)
    for mesh in kind.meshes(cluster, shape):
        if real_shape(mesh) == shape:
            return kind(kind.read(plan, graph), mesh)
    raise ClusterError(
        f"{cluster.name} has no mesh {plan.mesh.label} among those that follow the links of its "
        f"{counted(cluster.device_count, 'device')}; this {plan.kind.name} runs on {plan.devices}: name a "
        f"cluster with such a mesh, or explore on {cluster.name}"
    )


@dataclass(frozen=True)
class Rebuilt:
    """The strategy of a point, and the costs that it was simulated with."""

    plan: StrategyOnMesh
    recorded: Recorded
    cluster: Cluster
    settings: Settings

    def costs(self, *, cluster: Cluster | None = None, recorded: Recorded | None = None) -> RecordedCosts:
        """Return the costs to simulate at: the exploration's own, or those of another cluster with the same
        meshes, or changed ones."""
        return RecordedCosts(recorded or self.recorded, cluster or self.cluster, self.settings)

    def simulated(self, **changed: Any) -> SimulatedStep:
        """Return the simulated step at the costs that :meth:`costs` returns for the same arguments."""
        return self.plan.simulated(self.costs(**changed))


def rebuilt(exploration: Exploration, index: int, recorded: Recorded) -> Rebuilt:
    """Return the strategy of point ``index`` of ``exploration.all_points`` with its costs."""
    plan, cluster = exploration.plan(index), Cluster.from_dict(exploration.cluster)
    kind = _KINDS[plan.kind.name]
    mesh = mesh_of(cluster, plan.mesh.shape, plan.mesh.names)
    strategy = kind.read(plan, recorded.grouped)
    return Rebuilt(kind(strategy, mesh), recorded, cluster, Settings.from_dict(exploration.settings))
