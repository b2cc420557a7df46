"""Models as placing planners take them, from data sheets, and what a planner's answer comes to."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import Cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import Problem, prepare_graph
from tensoropt.placement import PlacementProblem, simulate_placement
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


def placed(name: str, graph: PricedGraph) -> tuple[PlacementProblem, Any]:
    """What a placing planner answers, on the problem it leaves; of several answers the fastest."""
    entry: Any = planner(name)
    cut, answer = entry.placements(graph, None, 0)[-1]
    return cut.problem, answer


def played(answered: Callable[[], tuple[PlacementProblem, Any]]) -> Row:
    """The step and notes of a placing planner's answer, or why it refuses; and what it took."""
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        problem, answer = answered()
    except TensorOptError as error:
        return {"refused": str(error)}
    spent = {"search_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
    time_s = simulate_placement(problem, answer.placement).time_s
    return {"time_s": time_s, **spent, "notes": answer.notes}
