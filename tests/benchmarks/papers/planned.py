"""Models as placing planners take them, from data sheets, and what a planner's answer comes to."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import Cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import Problem, prepare_graph
from tensoropt.placement import simulate_placement
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.planners.registry import planner
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.benchmarks.program import Row


@lru_cache(maxsize=2)
def captured(model: str, batch: int | None, options: tuple[tuple[str, int], ...] = ()) -> Problem:
    """A model of the zoo with a batch (None: its own), grouped; several clusters share it."""
    built = zoo.build(model, device="meta", batch=batch, **dict(options))
    return prepare_graph(capture(built.model, built.args, built.kwargs).graph)


def priced(
    model: str,
    batch: int | None,
    cluster: Cluster,
    store: ProfileStore,
    options: tuple[tuple[str, int], ...] = (),
) -> PricedGraph:
    """A model's operators on single devices, from data sheets."""
    costs = CostSource(cluster, store, Settings(process_memory=False), None)
    return PlacedPrices(captured(model, batch, options).graph, cluster, costs).price()


def placed(name: str, graph: PricedGraph) -> tuple[PricedGraph, Any]:
    """What a placing planner answers, on the graph it leaves; of several answers the fastest."""
    entry: Any = planner(name)
    return entry.placements(graph, None, 0)[-1]


def played(name: str, graph: PricedGraph) -> Row:
    """Step, memory and notes of a placing planner's answer, or why it refuses; and what it took."""
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        graph, answer = placed(name, graph)
    except TensorOptError as error:
        return {"refused": str(error)}
    simulated = simulate_placement(graph.problem, answer.placement)
    spent, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    return {
        "time_s": simulated.time_s,
        "memory_bytes": simulated.memory_bytes,
        "search_s": spent,
        "cpu_s": cpu_s,
        "notes": answer.notes,
    }
