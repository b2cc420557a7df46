"""Published planners on the tables of an exploration, and points of a saved exploration at current costs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import replace

from tensoropt.costs.source import CostSource, real_shape
from tensoropt.evaluation.evaluate import evaluate_strategy
from tensoropt.evaluation.problem import micro_batch_counts
from tensoropt.exploration.exploration import Exploration
from tensoropt.placement.points import placed_space
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.point import unbeaten, with_others
from tensoropt.planners.compare import compare
from tensoropt.planners.pipelined.common.task import PipelineTask
from tensoropt.planners.registry import Entry
from tensoropt.planners.tables import TableSpace
from tensoropt.planners.task import PlanningTask
from tensoropt.profiling.workload import workload
from tensoropt.report.explain import Recosted
from tensoropt.session.evaluation import certified, only_used_spaces, record_used
from tensoropt.session.one_space import SearchedSpace
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.candidates import overlap_of


def recost_point(session: Session, searched: Searched, old: Exploration, index: int) -> Recosted:
    """Return the memory and time of a point of another exploration of the same operators, at this one's
    prices."""
    plan = old.plan(index)
    if plan.kind.made_anew:
        return Recosted(index, None, None, plan.kind.made_anew)
    found = _same_space(searched, plan.mesh.shape, plan.micro_batches)
    if found is None:
        reason = f"mesh {plan.mesh.label} is not one of {session.cluster.name}'s"
        return Recosted(index, None, None, reason)
    graph = searched.problem.graph
    strategy = Strategy.from_data(plan.strategy_data(), graph)
    works = {n: workload(graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    # From the source and not from the tables: an old strategy need not be among today's configurations.
    facts = {n: searched.costs.facts.of(work) for n, work in works.items()}
    overlap = overlap_of(session.cluster, found.mesh, beside=found.tables.prices.beside)
    metrics = evaluate_strategy(strategy, works, facts, found.tables.prices, overlap).metrics
    return Recosted(index, float(metrics.memory_bytes[0]), float(metrics.time_s[0]))


def _same_space(searched: Searched, shape: tuple[int, ...], micro_batches: int) -> SearchedSpace | None:
    for space in searched.spaces:
        if real_shape(space.mesh) == shape and space.tables.mesh[0] == micro_batches:
            return space
    return None


def with_planners(
    session: Session,
    searched: Searched,
    exploration: Exploration,
    entries: Sequence[Entry],
    limits: Sequence[float | None],
) -> Exploration:
    """Return the exploration with what the planners find in the same tables, and a row of comparison for
    each.

    Args:
        limits: bytes of memory per device that the planners are given; None for all trade-offs they know.
    """
    frontier = exploration.points
    # Store and ranks are opened only for planners that price anew, and closed after all have run.
    with ExitStack() as stack:
        task = planning_task(session, searched, exploration, {entry.kind for entry in entries}, stack)
        seed = exploration.model.seed
        rows, others = compare(task, entries, limits, frontier, seed, session.progress)
    others = certified(searched.spaces, others)
    # The simulator's figures differ from the tables' sums by strategy, so that another planner's point may
    # lie below the frontier that was tracked in those sums.
    merged = unbeaten(with_others(frontier, others))
    return only_used_spaces(
        replace(
            exploration,
            spaces=task.base.spaces,
            points=merged,
            others=others,
            comparison=tuple(row.to_dict() for row in rows),
            recorded=record_used(searched, task.base.spaces, (*frontier, *others)),
        )
    )


def planning_task(
    session: Session, searched: Searched, exploration: Exploration, kinds: Set[str], stack: ExitStack
) -> PlanningTask:
    """Return the task for planners of these kinds on the tables of an exploration.

    The exploration in the task has further spaces, for pipelines and placed plans, for which its own have no
    place.

    Args:
        stack: closes the resources that prices of further work need.
    """
    tables = tuple(
        TableSpace(s.mesh, s.tables, names)
        # Spaces of pipelines and of placed plans come after those that were searched.
        for s, names in zip(searched.spaces, exploration.spaces, strict=False)
    )
    spaces, staged, prices = list(exploration.spaces), None, None
    counts: tuple[int, ...] = (1,)
    costs = _costs(session, searched, stack) if kinds - {"sharded"} else searched.costs
    if "pipelined" in kinds:
        staged = PipelineTask(searched.problem, session.cluster, costs, session.settings, len(spaces))
        spaces += staged.spaces
    if "placed" in kinds:
        graph, constraints = searched.problem.graph, session.settings.constraints
        prices = PlacedPrices(graph, session.cluster, costs, constraints)
        counts = micro_batch_counts(searched.problem, session.settings)
        names = searched.problem.parameter_keys
        spaces += (placed_space(session.cluster, names, count) for count in counts)
    base = replace(exploration, spaces=tuple(spaces))
    return PlanningTask(searched.problem, session.cluster, tables, base, prices, staged, counts)


def _costs(session: Session, searched: Searched, stack: ExitStack) -> CostSource:
    """Return costs of further work, from the source of the tables' costs; ``stack`` closes the resources they
    need."""
    store = stack.enter_context(session.open_store())
    pool = stack.enter_context(session.open_ranks())
    return replace(searched.costs, store=store, pool=pool, progress=session.progress)
