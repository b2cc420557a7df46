"""Models placed at random, and how far their results are from the unsplit model's."""

import random
from functools import cache
from typing import Any

import pytest
import torch

from tensoropt import Cluster, Settings, load_cluster
from tensoropt.capture.steps import largest_of
from tensoropt.costs.source import CostSource
from tensoropt.engine.engine import Engine, unsplit_strategy
from tensoropt.engine.models import CapturedModel, open_model
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.execute.transport import Alone
from tensoropt.placement.points import plan_part
from tensoropt.placement.prices import PricedGraph
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.plan.plan import CollectiveCount, MeshInfo, ModelInfo, Plan, Predicted
from tensoropt.profiling.store import ProfileStore
from tensoropt.verify.reference import named_difference
from tests.execute.jobs import spec
from tests.placement.execute.random_placed import random_placed


@cache
def opened(name: str, **more: Any) -> CapturedModel:
    return open_model(spec(name, **more))


def placed(
    loaded: CapturedModel, seed: int, devices: int = 3, share: float = 0.4, micro_batches: int = 1
) -> PlacedStrategy:
    return random_placed(loaded.graph, devices, random.Random(seed), share, micro_batches)


def in_one_process(loaded: CapturedModel, strategy: PlacedStrategy, seed: int = 0) -> PlacedEngine:
    return PlacedEngine(strategy, loaded.values, seed=seed)


def unsplit(loaded: CapturedModel, seed: int = 0) -> ShardedEngine:
    return ShardedEngine(unsplit_strategy(loaded.graph), loaded.values, seed=seed)


def step(engine: Engine, loaded: CapturedModel) -> float:
    engine.shards.clear()
    loss = engine(*loaded.inputs)[0]
    loss.backward()
    return float(loss.detach())


def difference(found: Any, wanted: Any) -> float:
    """Largest difference of any named tensor, relative to its largest value, or to a thousandth of the
    largest of all."""
    return named_difference(found, wanted, 1e-3 * largest_of(wanted.values()))


def assert_alike(
    engine: Engine, whole: Engine, loaded: CapturedModel, *, steps: int = 2, loss: float = 1e-6,
    gradients: float = 2e-5, buffers: float = 2e-5,
) -> None:  # fmt: skip
    """Whether steps have the losses, gradients and buffers of the unsplit model, next to these shares."""
    for _ in range(steps):  # a second one has other dropout, and statistics that have moved
        wanted, found = step(whole, loaded), step(engine, loaded)
        assert found == pytest.approx(wanted, rel=loss)
        assert engine.shards.gradients.keys() == whole.shards.gradients.keys()
        assert difference(engine.shards.gradients, whole.shards.gradients) < gradients
        assert difference(engine.buffers, whole.buffers) < buffers


def costs_on(cluster: Cluster | str, **settings: Any) -> CostSource:
    """Costs from data sheets: nothing is measured yet."""
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return CostSource(found, ProfileStore(":memory:"), Settings(**settings), None)


def plan_of(priced: PricedGraph, placement: Placement, source: str, sends: Any = ()) -> Plan:
    """The plan of a placement, as a planner would write it; ``sends``: the messages that are predicted."""
    simulated = simulate_placement(priced.problem, placement)
    part, graph = plan_part(priced.graph, simulated), priced.prices.graph
    predicted = Predicted(
        memory_bytes=simulated.memory_bytes, time_s=simulated.time_s, compute_s=0, communication_s=0,
        additive_memory_bytes=0, collectives=tuple(CollectiveCount.model_validate(row) for row in sends),
    )  # fmt: skip
    return Plan(
        planner="by hand", model=ModelInfo(source=source, fingerprint=graph.atoms.graph.fingerprint),
        cluster=priced.prices.cluster.to_dict(), micro_batches=1, optimizer="adam", hubs={},
        mesh=MeshInfo(shape=(priced.problem.devices.count,), names=("device",), placed=True),
        operators=part.operators, parameters=part.parameters, stages=part.stages, predicted=predicted,
    )  # fmt: skip


def record_moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every value and gradient that engines made from now on move inside this process."""
    moved: list[int] = []
    send = Alone.send

    def recording(self: Alone, number: int, target: int, value: torch.Tensor) -> None:
        moved.append(value.numel() * value.element_size())
        send(self, number, target, value)

    monkeypatch.setattr(Alone, "send", recording)
    return moved
