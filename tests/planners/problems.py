"""Small problems at toy prices for every planner."""

from __future__ import annotations

from functools import cache
from math import prod

from tensoropt.cluster import load_cluster
from tensoropt.cluster.hardware import Mesh
from tensoropt.costs.source import CostSource
from tensoropt.evaluation.evaluate import space_of
from tensoropt.exploration.exploration import Exploration
from tensoropt.placement.points import placed_space
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import Point, reduce_points
from tensoropt.planners.pipelined.common.task import PipelineTask
from tensoropt.planners.results import simulated_points
from tensoropt.planners.tables import TableSpace
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.search import track_frontier
from tensoropt.session.run_report import versions
from tests.costs.models import gates, gpt2, problem, tables_of, two_layers, unrolled

MODELS = {"two layers": two_layers, "gates": gates, "gpt2": gpt2, "unrolled": unrolled}


def mesh_of(cluster, shape: tuple[int, ...]) -> Mesh:
    return next(m for m in cluster.meshes(3) if tuple(n for n in m.shape if n > 1) == shape)


@cache
def small(
    name: str, meshes: tuple[tuple[int, ...], ...] = ((2,),), counts: tuple[int, ...] = (1,)
) -> PlanningTask:
    """A problem over meshes of one size and micro-batch counts; priced by the toy prices.

    Placing planners, and those of pipelines, have prices from the data sheet of a CPU core.
    """
    prepared = problem(MODELS[name])
    cluster = load_cluster(f"local:{prod(meshes[0])}")
    spaces = []
    for shape in meshes:
        for count in counts:
            mesh = mesh_of(cluster, shape)
            tables = tables_of(prepared, (count, *shape))
            spaces.append(TableSpace(mesh, tables, space_of(prepared, mesh, tables, ())))
    graph = prepared.captured.graph
    costs = CostSource(cluster, ProfileStore(":memory:"), Settings(), None)
    staged = PipelineTask(prepared, cluster, costs, Settings(), len(spaces))
    base = Exploration(
        points=(),
        spaces=(
            *(s.names for s in spaces),
            *staged.spaces,
            *(placed_space(cluster, spaces[0].names.keys, count) for count in counts),
        ),
        model=ModelInfo(source=f"tests:{name}", fingerprint=graph.fingerprint),
        cluster=cluster.to_dict(),
        settings=Settings(dtype="float32").to_dict(),
        versions=versions(),
        report={},
    )
    prices = PlacedPrices(prepared.graph, cluster, costs)
    return PlanningTask(prepared, cluster, tuple(spaces), base, prices, staged, counts)


@cache
def searched(name: str, *more) -> tuple[Point, ...]:
    """What the exact search finds for :func:`small`, simulated: a frontier in what is added up."""
    question = small(name, *more)
    tracked = [track_frontier(space.tables, epsilon=0.0).strategies() for space in question.spaces]
    selections = [
        Selection(number, found.strategy(i), found.options_of(i))
        for number, found in enumerate(tracked)
        for i in range(len(found))
    ]
    return tuple(simulated_points(question, "frontier", selections))


@cache
def frontier(name: str, *more) -> tuple[Point, ...]:
    """The exact frontier of :func:`small` under the simulator."""
    return reduce_points(searched(name, *more), lambda p: (p.memory_bytes, p.time_s))
