"""What the cost side says of strategies, figure by figure as the search and the simulator would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.cluster import Mesh
from tensoropt.costs.prices import Prices
from tensoropt.costs.source import CostSource
from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.plans import PlacedStrategy, ValueTransfer
from tensoropt.placement.prices import PricedGraph
from tensoropt.plan import Plan
from tensoropt.plan.evaluate import evaluate_strategy
from tensoropt.profiling.workload import workload
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import predicted_collectives
from tensoropt.simulate.overlap import overlap_of

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Prediction:
    """What the cost side says of a strategy: collectives (axes from 0), bytes and seconds of one rank, and
    where the simulator was asked, seconds of its collectives.

    Of a placed one: messages with their ends instead of axes, bytes of the fullest device.
    """

    collectives: Rows
    memory_bytes: float
    time_s: float
    network_s: float | None = None


def prediction_of(plan: Plan, graph: GroupGraph) -> Prediction:
    """What a plan file says of itself."""
    rows = [c.model_dump(mode="json") for c in plan.predicted.collectives]
    if plan.placed is not None:
        rows += result_rows(graph, plan.devices)
    # A tracker sees tensors, not what a process takes beside them.
    return Prediction(rows, plan.predicted.tensor_bytes, plan.predicted.time_s)


def result_rows(graph: GroupGraph, devices: int) -> Rows:
    """How ranks of a placed plan all get the model's results: from where they are made."""
    source = graph.atoms.graph
    made = [source.tensors[name] for name in source.outputs if source.tensors[name].kind == "activation"]
    sizes = Counter(tensor.bytes for tensor in made) if devices > 1 else Counter()
    return [{"kind": "broadcast", "axes": [0], "bytes": size, "count": n} for size, n in sizes.items()]


def predict_placed(graph: PricedGraph, placement: Placement) -> tuple[PlacedStrategy, Prediction]:
    """A placement as it runs, and what the simulator of placed plans says of it."""
    simulated = simulate_placement(graph.problem, placement)
    tensors = simulated.problem.tensors
    transfers = tuple(ValueTransfer(tensors[t].name, i, j, back) for t, i, j, back in simulated.transfers)
    sends = Counter(((i, j), tensors[t].bytes) for t, i, j, _ in simulated.transfers)
    rows: Rows = [
        {"kind": "send", "axes": list(pair), "bytes": size, "count": n} for (pair, size), n in sends.items()
    ]
    rows += result_rows(graph.graph.groups, simulated.problem.devices.count)
    strategy = PlacedStrategy(graph.graph, placement, transfers)
    return strategy, Prediction(rows, simulated.memory_bytes, simulated.time_s)


def predict(drawn: Sequence[tuple[Strategy, Mesh]], costs: CostSource) -> list[Prediction]:
    """Price strategies as the cost tables do, measuring only what these strategies need."""
    works = [
        {
            name: workload(strategy.graph, configuration, strategy.mesh)
            for name, configuration in strategy.configurations.items()
        }
        for strategy, _ in drawn
    ]
    # All strategies' work at once, by key: what several of them share is measured once.
    costs.measure({w.key: w for of_strategy in works for w in of_strategy.values()})
    models = {mesh.label: costs.communication(mesh) for mesh in dict.fromkeys(mesh for _, mesh in drawn)}
    compute, overheads = costs.compute(), costs.overheads()
    predictions = []
    for (strategy, mesh), of_strategy in zip(drawn, works, strict=True):
        facts = {name: costs.facts_of(w) for name, w in of_strategy.items()}
        found = predicted_collectives(strategy, facts)
        optimizer = costs.settings.optimizer
        prices = Prices(strategy.graph, strategy.mesh, compute, models[mesh.label], optimizer, overheads)
        overlap = overlap_of(costs.cluster, mesh, beside=costs.beside)
        simulated = evaluate_strategy(strategy, of_strategy, facts, prices, overlap).metrics
        rows = [{**c._asdict(), "axes": list(c.axes), "count": n} for c, n in sorted(found.items())]
        seconds = float(simulated.total_s[0]), float(simulated.communication_s[0])
        predictions.append(Prediction(rows, float(simulated.memory.sum()), *seconds))
    return predictions


def predicted(drawn: Sequence[tuple[Strategy, Mesh]], costs: CostSource) -> list[tuple[Strategy, Prediction]]:
    """Strategies with what :func:`predict` says of them."""
    return [(strategy, found) for (strategy, _), found in zip(drawn, predict(drawn, costs), strict=True)]
