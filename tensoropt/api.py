"""The whole pipeline on one page: model + cluster -> frontier.

capture -> atoms and groups -> configurations -> facts and measurements -> cost tables -> search -> judge
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from tensoropt.capture import Mode, capture
from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.costs.source import CostSource, build_tables, real_shape
from tensoropt.costs.tables import CostTables
from tensoropt.errors import InfeasibleError
from tensoropt.ops.atom_graph import AtomGraph
from tensoropt.placement.points import placed_space
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.call import describe_call
from tensoropt.plan.constraints import Given, constraints_of, left_to_search
from tensoropt.plan.coverage import shares_of_flops, undivided
from tensoropt.plan.evaluate import evaluate_strategy, space_of
from tensoropt.plan.exploration import Exploration, Point, Space, reduce_points, unbeaten
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.problem import (
    Problem,
    Settings,
    micro_batch_counts,
    offered_regions,
    prepare,
    prepare_graph,
)
from tensoropt.plan.recorded import record
from tensoropt.planners.compare import asked, compare
from tensoropt.planners.registry import Entry
from tensoropt.planners.task import PlanningTask, TableSpace
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload import workload
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.report.detail import recorded_of
from tensoropt.report.explain import Recosted
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.simulate.overlap import overlap_of
from tensoropt.spaces import SearchedSpace, certified, judge_all, search_all
from tensoropt.types import Progress, silent
from tensoropt.units import format_bytes

MAX_AXES = 3


def searched_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """The cluster's meshes of up to :data:`MAX_AXES` axes, at most one axis more than it has link levels.

    Inside one uniform level a third axis offers no link that two axes lack, and multiplies the work (CPU
    seconds for GPT-2 on 8 devices, tables + search: 4.4 + 0.5 for 2x4, 9.5 + 7 for 2x2x2, per micro-batch
    count).
    """
    most = min(MAX_AXES, 1 + len(cluster.levels))
    return cluster.meshes(most)


def _left_out(cluster: Cluster) -> tuple[str, ...]:
    """What the choice of meshes left out, in words."""
    count = len(cluster.meshes(MAX_AXES)) - len(searched_meshes(cluster))
    most = min(MAX_AXES, 1 + len(cluster.levels))
    return (f"not searched: meshes of more than {most} axes ({count})",) if count else ()


def _lost(atoms: AtomGraph) -> Iterator[str]:
    """Operators that could not be tried without their rules, in words."""
    for target, reason in atoms.lost().items():
        yield (
            f"{target} has no rule and is kept whole on every device: {reason}; once it is mended, "
            "`tensoropt profiles --forget-failed` has it tried again"
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
    dtype: str = "float32",
    recompute: str = "auto",
    constraints: Given = None,
    measure: str = "all",
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
        cluster: ``local``, ``local:N``, a preset, a file, or a :class:`Cluster`. CPU ranks and the GPUs of
            this machine are measured; anything else is priced from data sheets.
        loss: maps the output to a scalar, where the model returns none.
        mode: ``train`` or ``inference``.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        micro_batches: ``auto`` (1, 2, 4, 8 where they divide the batch) or counts.
        memory_bytes: refuse to return when not even the leanest plan fits this budget.
        epsilon: allowed gap of the frontier; 0 for the exact one.
        max_points: points kept per mesh and micro-batch count.
        recompute: ``auto`` lets the search recompute repeated blocks in backward, ``never`` does not.
        dtype: ``float32`` leaves the model's own dtypes; ``bfloat16`` computes in it, with float32 master
            weights, gradients and optimizer state (:mod:`tensoropt.capture.precision`).
        constraints: what operators must or should do (:mod:`tensoropt.sharding.constraints`), or the path of
            a file that says so.
        measure: ``never`` prices what the profile store does not know from a fit to what it knows, instead of
            timing it on CPU ranks.
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
    limited = constraints_of(constraints)
    settings = Settings(
        mode, optimizer, micro_batches, memory_bytes, epsilon, max_points, dtype, recompute, limited, measure
    )
    report_progress = progress or silent
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    where = load_cluster(cluster)
    rivals = asked(planners)
    report_progress("capture", 0, 1, type(model).__name__)
    with clock("capture"), ExitStack() as stack:
        captured = capture(model, args, kwargs, loss=loss, mode=mode, dtype=dtype)
        problem = prepare(captured, store or stack.enter_context(ProfileStore()))
    report_progress(
        "capture", 1, 1, f"{len(captured.graph.operators)} operators, {len(problem.graph.groups)} groups"
    )
    graph = captured.graph
    info = ModelInfo(
        source=source,
        fingerprint=graph.fingerprint,
        mode=mode,
        seed=seed,
        parameters=sum(t.elements for t in graph.parameters),
        call=describe_call(args, kwargs or {}),
    )
    run = _Run(problem, where, settings, info, clock, report_progress, store)
    exploration = replace(run.explore(), captured=captured)
    return run.compare(exploration, rivals, limits) if rivals else exploration


@dataclass
class _Run:
    """A model that is there as operators only, searched on a cluster."""

    problem: Problem
    where: Cluster
    settings: Settings
    info: ModelInfo
    clock: _Clock
    progress: Progress
    store: ProfileStore | None = None
    costs: CostSource | None = None
    searched: Sequence[SearchedSpace] = ()

    def explore(self) -> Exploration:
        graph, progress = self.problem.graph.atoms.graph, self.progress
        counts = micro_batch_counts(self.problem, self.settings)
        meshes = searched_meshes(self.where)
        left = left_to_search(self.settings.constraints, self.problem, self.where, meshes, counts)
        with ExitStack() as stack:
            own = self.store or stack.enter_context(ProfileStore())
            pool = self._pool(stack)
            costs = self.costs = CostSource(self.where, own, self.settings, pool, progress)
            with self.clock("costs"):
                built = build_tables(
                    self.problem.graph,
                    self.problem.micro,
                    costs,
                    meshes,
                    counts,
                    offered_regions(self.problem, self.settings),
                    left.spaces,
                )
                _, split_share = shares_of_flops(self.problem, costs.facts_of)
        with self.clock("search"):
            searched, refused = search_all(built, self.settings, progress)
            self.searched = searched
            notes = (*left.notes, *refused, *undivided((t for _, t, _ in built), left.groups))
        with self.clock("judge"):
            spaces = tuple(space_of(self.problem, s.mesh, s.tables, s.notes) for s in searched)
            points, played = judge_all(searched, spaces, self.settings, costs, progress)
            recorded = record(graph, _used(searched, spaces, points))
        _check_budget(points, self.settings.memory_bytes)
        return Exploration(
            points=points,
            spaces=spaces,
            model=self.info,
            cluster=self.where.to_dict(),
            settings=self.settings.to_dict(),
            versions=versions(),
            report=_report(self.problem, self.clock.seconds, played, costs, split_share, notes),
            recorded=recorded,
        )

    def _pool(self, stack: ExitStack) -> RankPool | None:
        """Ranks to measure on, where the cluster is this machine and may be measured."""
        pool = None if self.settings.measure == "never" else local_pool(self.where)
        return None if pool is None else stack.enter_context(pool)

    def compare(
        self, exploration: Exploration, rivals: Sequence[Entry], limits: Sequence[float | None]
    ) -> Exploration:
        """The exploration with what other planners find in the same tables."""
        frontier, seed = exploration.points, self.info.seed
        tables = tuple(
            TableSpace(s.mesh, s.tables, names)
            for s, names in zip(self.searched, exploration.spaces, strict=True)
        )
        with ExitStack() as stack:
            prices = None
            if any(entry.kind == "placed" for entry in rivals):
                prices = self._placed_prices(stack)
                keys = {t.name: str(t.key) for t in self.problem.graph.atoms.graph.parameters}
                spaces = (*exploration.spaces, placed_space(self.where, keys))
                exploration = replace(exploration, spaces=spaces)
            question = PlanningTask(self.problem, self.where, tables, exploration, prices)
            rows, others = compare(question, rivals, limits, frontier, seed, self.progress)
        others = certified(self.searched, others)
        # The judge's corrections differ by strategy, so that another planner's point may lie below the line.
        merged = unbeaten(reduce_points([*frontier, *others], lambda p: (p.memory_bytes, p.time_s)))
        graph = self.problem.graph.atoms.graph
        return replace(
            exploration,
            points=merged,
            others=others,
            comparison=tuple(row.to_dict() for row in rows),
            recorded=record(graph, _used(self.searched, exploration.spaces, (*frontier, *others))),
        )

    def _placed_prices(self, stack: ExitStack) -> PlacedPrices:
        """Prices of single operators, from where the tables' came; ``stack`` closes what they need."""
        own = self.store or stack.enter_context(ProfileStore())
        pool = self._pool(stack)
        known = self.costs or CostSource(self.where, own, self.settings)
        costs = replace(known, store=own, pool=pool, progress=self.progress)
        return PlacedPrices(self.problem.graph, self.where, costs, self.settings.constraints)

    def cost_again(self, old: Exploration, index: int) -> Recosted:
        """A point of another exploration of the same operators, at this one's prices."""
        if old.points[index].placed is not None:
            return Recosted(index, None, None, "placed plans are made anew, by `tensoropt compare`")
        plan = old.plan(index)
        space = old.spaces[old.points[index].space]
        found = next(
            (
                s
                for s in self.searched
                if real_shape(s.mesh) == space.mesh.shape and s.tables.mesh[0] == space.micro_batches
            ),
            None,
        )
        if found is None or self.costs is None:
            reason = f"mesh {space.mesh.label} is not one of {self.where.name}'s"
            return Recosted(index, None, None, reason)
        strategy = strategy_from_dict(plan.strategy_data(), self.problem.graph)
        works = {
            n: workload(self.problem.graph, c, strategy.mesh) for n, c in strategy.configurations.items()
        }
        facts = {n: self.costs.facts_of(w) for n, w in works.items()}
        overlap = overlap_of(self.where, found.mesh)
        found_prices = found.tables.prices
        played = evaluate_strategy(strategy, works, facts, found_prices, overlap).metrics
        return Recosted(index, float(played.memory.sum()), float(played.total_s[0]))


def _used(
    searched: Sequence[SearchedSpace], spaces: Sequence[Space], points: Sequence[Point]
) -> Iterator[tuple[CostTables, Mapping[str, int]]]:
    for point in points:
        if point.placed is not None:
            continue
        names = spaces[point.space].variables
        yield searched[point.space].tables, dict(zip(names, point.choice, strict=True))


def _check_budget(points: Sequence[Point], memory_bytes: float | None) -> None:
    if memory_bytes is not None and points[0].memory_bytes > memory_bytes:
        raise InfeasibleError(
            f"no plan fits {format_bytes(memory_bytes)}; the smallest plan needs "
            f"{format_bytes(points[0].memory_bytes)}"
        )


def recost(
    exploration: Exploration,
    *,
    cluster: str | Cluster | None = None,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    planners: str | Sequence[str] = (),
) -> tuple[Exploration, tuple[Recosted, ...]]:
    """Explore the operator graph saved with an exploration again, at the costs of now.

    Nothing is captured: the model is not needed. The search is made anew, with the same settings and
    what the store, the cluster file and the links say today; the old strategies are played at the same new
    costs beside it.

    Args:
        cluster: another one; by default the one that was saved.
        store, progress, planners: as in :func:`explore`.

    Returns:
        (the new exploration, per old point its memory and time at the new costs).

    Raises:
        TensorOptError: the exploration was saved without its operator graph.
        InfeasibleError: no plan fits the budget that the exploration was made with.
    """
    graph = recorded_of(exploration).graph
    where = Cluster.from_dict(exploration.cluster) if cluster is None else load_cluster(cluster)
    run = _Run(
        prepare_graph(graph),
        where,
        Settings.from_dict(exploration.settings),
        exploration.model,
        _Clock({}),
        progress or silent,
        store,
    )
    rivals = asked(planners)
    found = run.explore()
    if rivals:
        found = run.compare(found, rivals, (None,))
    again = tuple(run.cost_again(exploration, i) for i in range(len(exploration.points)))
    return found, again


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


def _report(
    problem: Problem,
    seconds: Mapping[str, float],
    played: int,
    costs: CostSource,
    split_share: float,
    notes: Sequence[str],
) -> dict[str, Any]:
    graph, spaces = problem.graph.atoms.graph, problem.graph.atoms.spaces
    spreads = [e["spread"] for e in costs.measured.values() if "spread" in e]
    return {
        "operators": len(graph.operators),
        "groups": len(problem.graph.groups),
        "hubs": len(problem.graph.hubs),
        "shared_parameters": len(problem.graph.shared),
        "operators_without_rule": sorted({op.target for op in graph.operators if not spaces[op.name].known}),
        "operators_discovered": {
            target: found
            for target, found in problem.graph.atoms.discoveries().items()
            if any(spaces[op.name].discovered for op in graph.operators if op.target == target)
        },
        "split_share_of_flops": split_share,
        "micro_batches_refused": problem.refusal,
        "notes": [
            *graph.notes,
            *_left_out(costs.cluster),
            *_lost(problem.graph.atoms),
            *costs.notes(),
            *notes,
        ],
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "points_before_judging": played,
        "workloads_measured": len(costs.measured),
        "median_spread": float(np.median(spreads)) if spreads else None,
        "failed_measurements": sum("error" in e for e in costs.measured.values()),
        "device": costs.cluster.device.name,
        "timed_now": costs.pool is not None,
        "fit": [asdict(error) for error in costs.efficiencies.errors] if costs.pool is None else [],
    }
