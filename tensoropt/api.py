"""The whole pipeline on one page: model + cluster -> frontier.

capture -> atoms and groups -> configurations -> facts and measurements -> cost tables -> search -> judge
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tensoropt.capture import Mode, capture
from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.pool import RankPool
from tensoropt.costs.source import CostSource, Progress, build_tables, is_local, silent
from tensoropt.costs.store import ProfileStore
from tensoropt.costs.tables import CostTables
from tensoropt.costs.workload import workload
from tensoropt.errors import InfeasibleError
from tensoropt.plan.call import describe_call
from tensoropt.plan.exploration import Exploration, Point, Space, reduce_points
from tensoropt.plan.judge import CHUNK, Judged, costs_of, judge, space_of
from tensoropt.plan.overlap import overlap_of
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.problem import Problem, Settings, micro_batch_counts, prepare
from tensoropt.planners.compare import asked, compare
from tensoropt.planners.problem import Problem as PlannerProblem
from tensoropt.planners.problem import TableSpace
from tensoropt.search import CostGraph, TrackedFrontier, track_frontier
from tensoropt.sharding.configurations import Configuration
from tensoropt.units import format_bytes

MAX_AXES = 3


@dataclass
class SearchedSpace:
    """Tables and frontier of one mesh and micro-batch count."""

    mesh: Mesh
    tables: CostTables
    frontier: TrackedFrontier
    communication: CommunicationModel


def searched_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """The cluster's meshes of up to :data:`MAX_AXES` axes, at most one axis more than it has link levels.

    Inside one uniform level a third axis multiplies the search (GPT-2 on 8 devices: 1.7 s for 2x4, 144 s for
    2x2x2) and offers no link that two axes lack.
    """
    most = min(MAX_AXES, 1 + len(cluster.levels))
    return cluster.meshes(most)


def _left_out(cluster: Cluster) -> tuple[str, ...]:
    """What the choice of meshes left out, in words."""
    count = len(cluster.meshes(MAX_AXES)) - len(searched_meshes(cluster))
    most = min(MAX_AXES, 1 + len(cluster.levels))
    return (f"not searched: meshes of more than {most} axes ({count})",) if count else ()


def cost_graph(tables: CostTables) -> CostGraph:
    """The tables as the search takes them."""
    graph = CostGraph()
    for variable in tables.variables:
        graph.add_operator(variable.name, variable.costs)
    for edge in tables.edges:
        graph.add_edge(edge.a, edge.b, edge.table, rows=edge.rows, cols=edge.cols)
    return graph


def explore(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster = "local",
    loss: Callable[[Any], torch.Tensor] | None = None,
    mode: Mode = "train",
    optimizer: str = "adam",
    micro_batches: str | Sequence[int] = "auto",
    memory_bytes: float | None = None,
    epsilon: float = 1e-3,
    max_points: int | None = None,
    dtype: str = "float32",
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    source: str = "",
    seed: int = 0,
    planners: str | Sequence[str] = (),
    limits: Sequence[float | None] = (None,),
) -> Exploration:
    """The cost frontier of one step of ``model(*args, **kwargs)`` on a cluster.

    Args:
        model: any module ``torch.export`` accepts; on the meta device for big models.
        args, kwargs: example inputs at the global batch size.
        cluster: ``local``, ``local:N``, a preset, a file, or a :class:`Cluster`. CPU ranks are measured;
            anything else is priced from data sheets.
        loss: maps the output to a scalar, where the model returns none.
        mode: ``train`` or ``inference``.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        micro_batches: ``auto`` (1, 2, 4, 8 where they divide the batch) or counts.
        memory_bytes: refuse to return when not even the leanest plan fits this budget.
        epsilon: allowed gap of the frontier; 0 for the exact one.
        max_points: points kept per mesh and micro-batch count.
        dtype: ``float32`` leaves the model's own dtypes; ``bfloat16`` computes in it, with float32 master
            weights, gradients and optimizer state (:mod:`tensoropt.capture.precision`).
        store: profile store; the user's own by default.
        progress: called with (stage, done, total, what).
        source, seed: where the model comes from, for plans that are run without a script.
        planners: published methods to run on the same tables, by name, or ``all``; their points and a row
            each are in ``others`` and ``comparison``.
        limits: memory per device they are given, bytes; None for all trade-offs they know.

    Raises:
        CaptureError, ClusterError, TensorOptError: with the rule, the values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    settings = Settings(mode, optimizer, micro_batches, memory_bytes, epsilon, max_points, dtype)
    report_progress = progress or silent
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    where = load_cluster(cluster)
    rivals = asked(planners)
    report_progress("capture", 0, 1, type(model).__name__)
    with clock("capture"):
        captured = capture(model, args, kwargs, loss=loss, mode=mode, dtype=dtype)
        problem = prepare(captured)
    report_progress(
        "capture", 1, 1, f"{len(captured.graph.operators)} operators, {len(problem.graph.groups)} groups"
    )
    counts = micro_batch_counts(problem, settings)
    meshes = searched_meshes(where)
    with ExitStack() as stack:
        own = store or stack.enter_context(ProfileStore())
        pool = stack.enter_context(RankPool(where.device_count)) if is_local(where) else None
        costs = CostSource(where, own, settings, pool, report_progress)
        with clock("costs"):
            built = build_tables(problem.graph, problem.micro, costs, meshes, counts)
    with clock("search"):
        searched = _search(built, settings, report_progress)
    with clock("judge"):
        spaces = tuple(
            space_of(problem, found.mesh, found.tables, found.frontier.notes) for found in searched
        )
        frontier, played = _judge_all(searched, spaces, settings, costs, report_progress)
    if memory_bytes is not None and frontier[0].memory_bytes > memory_bytes:
        raise InfeasibleError(
            f"no plan fits {format_bytes(memory_bytes)}; the smallest plan needs "
            f"{format_bytes(frontier[0].memory_bytes)}"
        )
    exploration = Exploration(
        points=frontier,
        spaces=spaces,
        model=ModelInfo(
            source=source,
            fingerprint=captured.graph.fingerprint,
            mode=mode,
            seed=seed,
            parameters=sum(t.elements for t in captured.graph.parameters),
            call=describe_call(args, kwargs or {}),
        ),
        cluster=where.to_dict(),
        settings=settings.to_dict(),
        versions=versions(),
        report=_report(problem, seconds, played, costs),
        captured=captured,
    )
    if not rivals:
        return exploration
    tables = tuple(TableSpace(s.mesh, s.tables, names) for s, names in zip(searched, spaces, strict=True))
    question = PlannerProblem(problem, where, tables, exploration)
    rows, others = compare(question, rivals, limits, frontier, seed, report_progress)
    # The judge's corrections differ by strategy, so that another planner's point may lie below the line.
    merged = reduce_points([*frontier, *others], lambda p: (p.memory_bytes, p.time_s))
    return replace(exploration, points=merged, others=others, comparison=tuple(row.to_dict() for row in rows))


def _judge_all(
    searched: Sequence[SearchedSpace],
    spaces: Sequence[Space],
    settings: Settings,
    costs: CostSource,
    progress: Progress,
) -> tuple[tuple[Point, ...], int]:
    """(what remains of all points once the judge has played them, how many were played)."""
    judged: list[list[Judged]] = []
    for number, found in enumerate(searched):
        progress("judge", number, len(searched), f"mesh {found.mesh.label}, {len(found.frontier)} points")
        chosen = [(found.frontier.strategy(i), found.frontier.options(i)) for i in range(len(found.frontier))]
        overlap = overlap_of(costs.cluster, found.mesh)
        judged.append(judge(found.tables, chosen, settings.optimizer, overlap))
    figures = [costs_of(of_space) for of_space in judged]
    played = [(number, i) for number, of_space in enumerate(figures) for i in range(len(of_space))]
    kept = reduce_points(played, lambda item: tuple(figures[item[0]][item[1]]))
    gaps = [found.frontier.gap for found in searched]
    points = tuple(
        judged[number][index // CHUNK].point(
            index % CHUNK,
            spaces[number],
            number,
            additive=(
                float(searched[number].frontier.memory[index]),
                float(searched[number].frontier.time[index]),
            ),
            exact=searched[number].frontier.exact,
            gap=float(gaps[number][index]),
        )
        for number, index in kept
    )
    progress("judge", len(searched), len(searched), f"{len(points)} of {len(played)} points remain")
    return points, len(played)


def _search(
    built: Sequence[tuple[Mesh, CostTables, CommunicationModel]], settings: Settings, progress: Progress
) -> list[SearchedSpace]:
    searched = []
    for index, (mesh, tables, communication) in enumerate(built):
        progress("search", index, len(built), f"mesh {mesh.label}, {tables.mesh[0]} micro-batches")
        frontier = track_frontier(
            cost_graph(tables), epsilon=settings.epsilon, max_points=settings.max_points
        )
        searched.append(SearchedSpace(mesh, tables, frontier, communication))
    progress("search", len(built), len(built), f"{sum(len(s.frontier) for s in searched)} points")
    return searched


class _Clock:
    """Seconds spent per stage."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self._name = ""
        self._start = 0.0

    def __call__(self, name: str) -> _Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = time.perf_counter() - self._start


def versions() -> dict[str, str]:
    from tensoropt import __version__

    return {
        "tensoropt": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _report(problem: Problem, seconds: Mapping[str, float], played: int, costs: CostSource) -> dict[str, Any]:
    graph, spaces = problem.graph.atoms.graph, problem.graph.atoms.spaces
    spreads = [e["spread"] for e in costs.measured.values() if "spread" in e]
    return {
        "operators": len(graph.operators),
        "groups": len(problem.graph.groups),
        "hubs": len(problem.graph.hubs),
        "shared_parameters": len(problem.graph.shared),
        "operators_without_rule": sorted({op.target for op in graph.operators if not spaces[op.name].known}),
        "split_share_of_flops": _split_share(problem, costs),
        "micro_batches_refused": problem.refusal,
        "notes": [*graph.notes, *_left_out(costs.cluster)],
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "points_before_judging": played,
        "workloads_measured": len(costs.measured),
        "median_spread": float(np.median(spreads)) if spreads else None,
        "failed_measurements": sum("error" in e for e in costs.measured.values()),
        "device": costs.cluster.device.name,
    }


def _split_share(problem: Problem, costs: CostSource) -> float:
    """Share of the FLOPs in groups that can be split at least two ways (the unsplit one not counted)."""
    total = split = 0.0
    for group in problem.graph.groups:
        whole = Configuration(group, (next(s for s in group.strategies if s.label == "none"),))
        flops = costs.facts_of(workload(problem.graph, whole, (1,))).forward_flops
        loops = {s.label.split("@")[0] for s in group.strategies} - {"none", "partial", "partial_grad"}
        total += flops
        split += flops if len(loops) >= 2 else 0.0
    return split / total if total else 1.0
