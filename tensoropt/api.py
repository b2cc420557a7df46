"""The whole pipeline on one page: model + cluster -> frontier.

    capture -> atoms and groups -> configurations -> facts and measurements -> cost tables -> search -> judge
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tensoropt.capture import Capture, Mode, capture
from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.costs.collectives import predicted_collectives
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.compute import MeasuredCompute, RooflineCompute, measurement_prefix
from tensoropt.costs.facts import Facts, find_facts
from tensoropt.costs.links import measure_links
from tensoropt.costs.measure import measure, measure_optimizer
from tensoropt.costs.pool import RankPool
from tensoropt.costs.store import ProfileStore
from tensoropt.costs.tables import CostTables, TableBuilder, Template, make_templates
from tensoropt.costs.workload import Workload, workload
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.plan.exploration import MEMORY_KINDS, Exploration, Point, Space, reduce_points
from tensoropt.plan.plan import MeshInfo, ModelInfo
from tensoropt.plan.simulate import simulate
from tensoropt.search import CostGraph, TrackedFrontier, track_frontier
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import (
    Configuration,
    MicroBatchRefused,
    batch_placements,
    micro_batch_strategies,
)
from tensoropt.sharding.groups import AxisStrategy, GroupGraph, group_operators
from tensoropt.sharding.placement import layout_names
from tensoropt.sharding.strategy import Strategy
from tensoropt.units import format_bytes

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, done, total, what)."""
AUTO_MICRO_BATCHES = (1, 2, 4, 8)
MAX_AXES = 3


def _silent(stage: str, done: int, total: int, what: str) -> None:
    return


@dataclass(frozen=True)
class Settings:
    """What can be chosen about an exploration; the defaults are the command line's."""

    mode: Mode = "train"
    optimizer: str = "adam"
    micro_batches: str | Sequence[int] = "auto"
    memory_bytes: float | None = None
    epsilon: float = 1e-3
    max_points: int | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "momentum", "adam"):
            raise TensorOptError(f"unknown optimizer '{self.optimizer}'; use sgd, momentum or adam")
        if self.mode not in ("train", "inference"):
            raise TensorOptError(f"unknown mode '{self.mode}'; use train or inference")
        if not 0 <= self.epsilon < 1:
            raise TensorOptError(f"epsilon {self.epsilon} is not between 0 and 1; 0.001 means 0.1 %")
        if self.max_points is not None and self.max_points < 2:
            raise TensorOptError(f"max_points {self.max_points} leaves no frontier; use at least 2")
        if not isinstance(self.micro_batches, str) and any(m < 1 for m in self.micro_batches):
            raise TensorOptError(f"micro-batch counts {list(self.micro_batches)} must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        micro = self.micro_batches if isinstance(self.micro_batches, str) else list(self.micro_batches)
        return {**vars(self), "micro_batches": micro}


@dataclass
class Problem:
    """A model made ready for costs: captured, factored into atoms, grouped.

    Attributes:
        micro: per group its strategy on the micro-batch axis (all unsplit when refused).
        refusal: why the model cannot run in micro-batches, or "".
    """

    captured: Capture
    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    refusal: str = ""


def prepare(captured: Capture) -> Problem:
    """Atoms, groups and micro-batch strategies of a captured model."""
    graph = group_operators(refine_graph(captured.graph))
    try:
        return Problem(captured, graph, micro_batch_strategies(graph))
    except MicroBatchRefused as refusal:
        whole = {g.name: next(s for s in g.strategies if s.label == "none") for g in graph.groups}
        return Problem(captured, graph, whole, str(refusal))


@dataclass
class CostSource:
    """Where costs come from on this cluster: ranks to measure on, or data sheets; facts by workload.

    Args:
        pool: ranks of this cluster when it is this machine, else None.
    """

    cluster: Cluster
    store: ProfileStore
    settings: Settings
    dtype: str
    pool: RankPool | None = None
    progress: Progress = _silent
    facts: dict[str, Facts] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        return self.settings.mode == "train"

    @property
    def prefix(self) -> str:
        return measurement_prefix(self.cluster.device_count, 1, self.training)

    def facts_of(self, work: Workload) -> Facts:
        """Facts of a workload: known in this process, in the store, or found now."""
        if work.key not in self.facts:
            key = f"torch-{torch.__version__}/{'train' if self.training else 'inference'}/{work.key}"
            record = self.store.get(key, kind="saved")
            facts = Facts.from_record(record) if record else find_facts(work, self.training)
            if record is None:
                self.store.put(key, facts.to_record(), kind="saved")
            self.facts[work.key] = facts
        return self.facts[work.key]

    def measure(self, works: Mapping[str, Workload]) -> None:
        """Time on the ranks what is not known yet."""
        if self.pool is not None:
            self.measured.update(
                measure(
                    works.values(),
                    self.pool,
                    self.store,
                    self.prefix,
                    training=self.training,
                    progress=lambda done, total, what: self.progress("measure", done, total, what),
                )
            )

    def compute(self) -> MeasuredCompute | RooflineCompute:
        if self.pool is None:
            return RooflineCompute(self.cluster.device, self.dtype, self.settings.optimizer)
        per_element = (
            measure_optimizer(self.pool, self.store, self.prefix, self.settings.optimizer) if self.training else 0.0
        )
        return MeasuredCompute(self.measured, per_element)

    def communication(self, mesh: Mesh) -> CommunicationModel:
        fits = None
        if self.pool is not None and mesh.size > 1:
            fits = measure_links(
                self.cluster,
                mesh,
                self.pool,
                self.store,
                pairs=False,
                functional=False,
                progress=lambda done, total, what: self.progress("links", done, total, what),
            )
        return CommunicationModel(self.cluster, mesh, fits)


def is_local(cluster: Cluster) -> bool:
    """Whether the cluster's devices are CPU ranks, which exist here and can be measured."""
    return cluster.device_type == "cpu"


def micro_batch_counts(problem: Problem, settings: Settings) -> tuple[int, ...]:
    """The micro-batch counts to search.

    Raises:
        TensorOptError: a count asked for is refused by the model or does not divide its batch.
    """
    inputs = [problem.captured.graph.tensors[n] for n in problem.captured.graph.inputs]
    places = batch_placements(problem.graph)
    batch = next((t.shape[0] for t in inputs if places[t.name] == 0), 1)
    if settings.micro_batches == "auto":
        if problem.refusal or settings.mode == "inference":
            return (1,)
        return tuple(m for m in AUTO_MICRO_BATCHES if batch % m == 0)
    if isinstance(settings.micro_batches, str):
        raise TensorOptError(f"micro-batches '{settings.micro_batches}' is neither 'auto' nor a list such as 1,2,4")
    for count in settings.micro_batches:
        if count > 1 and problem.refusal:
            raise TensorOptError(f"{count} micro-batches are refused: {problem.refusal}; use --micro-batches 1")
        if batch % count:
            raise TensorOptError(f"{count} micro-batches do not divide the batch of {batch}; use a divisor")
    return tuple(dict.fromkeys(settings.micro_batches))


@dataclass
class SearchedSpace:
    """Tables and frontier of one mesh and micro-batch count."""

    mesh: Mesh
    tables: CostTables
    frontier: TrackedFrontier
    communication: CommunicationModel


def real_shape(mesh: Mesh) -> tuple[int, ...]:
    """Axis sizes; a single device has no axes."""
    return tuple(size for size in mesh.shape if size > 1)


def cost_graph(tables: CostTables) -> CostGraph:
    """The tables as the search takes them."""
    graph = CostGraph()
    for variable in tables.variables:
        graph.add_operator(variable.name, variable.costs)
    for edge in tables.edges:
        graph.add_edge(edge.a, edge.b, edge.table, rows=edge.rows, cols=edge.cols)
    return graph


def build_tables(
    problem: Problem, costs: CostSource, meshes: Sequence[Mesh], counts: Sequence[int]
) -> list[tuple[Mesh, CostTables, CommunicationModel]]:
    """Cost tables of every mesh and micro-batch count; everything is measured before anything is priced."""
    shapes = [(mesh, (count, *real_shape(mesh))) for mesh in meshes for count in counts]
    templates: list[dict[str, Template]] = []
    works: dict[str, Workload] = {}
    for index, (_, shape) in enumerate(shapes):
        costs.progress("configurations", index, len(shapes), "x".join(map(str, shape[1:])) or "1")
        made = make_templates(problem.graph, shape, problem.micro, costs.facts_of)
        works.update({work.key: work for t in made.values() for work in t.works})
        templates.append(made)
    costs.progress("configurations", len(shapes), len(shapes), f"{len(works)} distinct workloads")
    costs.measure(works)
    compute = costs.compute()
    models = {mesh.label: costs.communication(mesh) for mesh in meshes}
    result = []
    for (mesh, shape), made in zip(shapes, templates, strict=True):
        builder = TableBuilder(
            problem.graph,
            shape,
            problem.micro,
            made,
            compute,
            models[mesh.label],
            costs.settings.optimizer,
            costs.cluster.device.memory_bandwidth / 2,
        )
        result.append((mesh, builder.build(), models[mesh.label]))
    return result


def facts_of_strategy(tables: CostTables, choice: Mapping[str, int]) -> dict[str, Facts]:
    return {g.name: tables.templates[g.name].facts[choice[g.name]] for g in tables.graph.groups}


def _space(problem: Problem, mesh: Mesh, tables: CostTables, notes: Sequence[str]) -> Space:
    names = tuple(n for n, size in zip(mesh.names, mesh.shape, strict=True) if size > 1)
    groups = {}
    for group in tables.graph.groups:
        variable = tables.by_name[group.name]
        labels = [group.strategies[i].label for i in range(len(group.strategies))]
        groups[group.name] = {
            "micro": problem.micro[group.name].label,
            "members": [op.name for op in group.operators],
            "parameters": list(group.parameters),
            "configurations": [[labels[i] for i in c] for c in tables.templates[group.name].choices],
            "options": [
                [[list(layout_names(home)) for home in option] for option in options] for options in variable.options
            ],
        }
    return Space(
        mesh=MeshInfo(shape=real_shape(mesh), names=names),
        micro_batches=tables.mesh[0],
        groups=groups,
        hubs={n: [list(layout_names(x)) for x in tables.by_name[f"hub:{n}"].layouts] for n in tables.graph.hubs},
        shared={
            n: [list(layout_names(x)) for x in tables.by_name[f"parameter:{n}"].layouts] for n in tables.graph.shared
        },
        keys={t.name: str(t.key) for t in problem.captured.graph.parameters},
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Judged:
    """A point of one space with the judge's figures, before what others beat is dropped."""

    searched: SearchedSpace
    index: int
    strategy: Strategy
    facts: Mapping[str, Facts]
    memory: tuple[float, ...]
    additive: float
    compute: float
    communication: float

    @property
    def memory_bytes(self) -> float:
        return float(sum(self.memory))

    @property
    def time_s(self) -> float:
        return self.compute + self.communication


def judge(searched: SearchedSpace, index: int, optimizer: str) -> Judged:
    """Play one point of a searched space."""
    choice, options = searched.frontier.strategy(index), searched.frontier.options(index)
    strategy = searched.tables.strategy(choice, options)
    facts = facts_of_strategy(searched.tables, choice)
    peak = simulate(strategy, facts, optimizer).peak
    memory = tuple(float(getattr(peak, kind)) for kind in MEMORY_KINDS)
    return Judged(searched, index, strategy, facts, memory, *searched.tables.breakdown(choice, options))


def _point(judged: Judged, space: Space, number: int, gap: float, compute_source: str) -> Point:
    frontier, communication = judged.searched.frontier, judged.searched.communication
    choice, options = frontier.strategy(judged.index), frontier.options(judged.index)
    found = predicted_collectives(judged.strategy, judged.facts)
    total = judged.time_s or 1.0
    sources = {compute_source: judged.compute / total}
    weights: dict[str, float] = {}
    for c, count in found.items():
        source = communication.source(c.kind, c.axes)
        weights[source] = weights.get(source, 0.0) + communication.time_s(c.kind, c.axes, c.bytes) * count
    for source, weight in weights.items():
        share = judged.communication / total * weight / (sum(weights.values()) or 1.0)
        sources[source] = sources.get(source, 0.0) + share
    return Point(
        memory_bytes=judged.memory_bytes,
        time_s=judged.time_s,
        compute_s=judged.compute,
        communication_s=judged.communication,
        additive_memory_bytes=judged.additive,
        memory=judged.memory,
        space=number,
        choice=tuple(choice[n] for n in space.variables),
        options=tuple(int(options.get(n, 0)) for n in space.variables),
        collectives=tuple((c.kind, c.axes, c.bytes, n) for c, n in sorted(found.items())),
        sources=sources,
        exact=frontier.exact,
        gap=gap,
    )


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
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    source: str = "",
    seed: int = 0,
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
        store: profile store; the user's own by default.
        progress: called with (stage, done, total, what).
        source, seed: where the model comes from, for plans that are run without a script.

    Raises:
        CaptureError, ClusterError, TensorOptError: with the rule, the values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    settings = Settings(mode, optimizer, micro_batches, memory_bytes, epsilon, max_points)
    report_progress = progress or _silent
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    where = load_cluster(cluster)
    report_progress("capture", 0, 1, type(model).__name__)
    with clock("capture"):
        captured = capture(model, args, kwargs, loss=loss, mode=mode)
        problem = prepare(captured)
    report_progress("capture", 1, 1, f"{len(captured.graph.operators)} operators, {len(problem.graph.groups)} groups")
    counts = micro_batch_counts(problem, settings)
    meshes = where.meshes(MAX_AXES)
    dtype = captured.graph.parameters[0].dtype if captured.graph.parameters else "float32"
    with ExitStack() as stack:
        own = store or stack.enter_context(ProfileStore())
        pool = stack.enter_context(RankPool(where.device_count)) if is_local(where) else None
        costs = CostSource(where, own, settings, dtype, pool, report_progress)
        with clock("costs"):
            built = build_tables(problem, costs, meshes, counts)
    with clock("search"):
        searched = _search(built, settings, report_progress)
    with clock("judge"):
        spaces = tuple(_space(problem, found.mesh, found.tables, found.frontier.notes) for found in searched)
        frontier, played = _judge_all(searched, spaces, settings, costs, report_progress)
    if memory_bytes is not None and frontier[0].memory_bytes > memory_bytes:
        raise InfeasibleError(
            f"no plan fits {format_bytes(memory_bytes)}; the smallest plan needs "
            f"{format_bytes(frontier[0].memory_bytes)}"
        )
    return Exploration(
        points=frontier,
        spaces=spaces,
        model=ModelInfo(
            source=source,
            fingerprint=captured.graph.fingerprint,
            mode=mode,
            seed=seed,
            parameters=sum(t.elements for t in captured.graph.parameters),
        ),
        cluster=where.to_dict(),
        settings=settings.to_dict(),
        versions=versions(),
        report=_report(problem, seconds, played, costs),
        captured=captured,
    )


def _judge_all(
    searched: Sequence[SearchedSpace],
    spaces: Sequence[Space],
    settings: Settings,
    costs: CostSource,
    progress: Progress,
) -> tuple[tuple[Point, ...], int]:
    """(what remains of all points once the judge has played them, how many were played)."""
    played: list[tuple[int, Judged]] = []
    for number, found in enumerate(searched):
        progress("judge", number, len(searched), f"mesh {found.mesh.label}, {len(found.frontier)} points")
        played += [(number, judge(found, i, settings.optimizer)) for i in range(len(found.frontier))]
    kept = reduce_points(played, lambda item: (item[1].memory_bytes, item[1].time_s))
    gaps = [found.frontier.gap for found in searched]
    compute_source = "measured" if costs.pool is not None else "data sheet"
    points = tuple(
        _point(judged, spaces[number], number, float(gaps[number][judged.index]), compute_source)
        for number, judged in kept
    )
    progress("judge", len(searched), len(searched), f"{len(points)} of {len(played)} points remain")
    return points, len(played)


def _search(
    built: Sequence[tuple[Mesh, CostTables, CommunicationModel]], settings: Settings, progress: Progress
) -> list[SearchedSpace]:
    searched = []
    for index, (mesh, tables, communication) in enumerate(built):
        progress("search", index, len(built), f"mesh {mesh.label}, {tables.mesh[0]} micro-batches")
        frontier = track_frontier(cost_graph(tables), epsilon=settings.epsilon, max_points=settings.max_points)
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
        "notes": list(graph.notes),
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
