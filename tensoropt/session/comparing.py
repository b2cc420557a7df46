"""Published planners asked on the tables of an exploration, beside its frontier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from tensoropt.costs.source import CostSource
from tensoropt.graph import Tensor
from tensoropt.placement.points import placed_space
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import reduce_points, unbeaten
from tensoropt.plan.problem import micro_batch_counts
from tensoropt.planners.compare import compare
from tensoropt.planners.pipelined.common.task import PipelineTask
from tensoropt.planners.registry import Entry
from tensoropt.planners.tables import TableSpace
from tensoropt.planners.task import PlanningTask
from tensoropt.session.evaluation import certified, record_used
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session


def with_planners(
    session: Session,
    searched: Searched,
    exploration: Exploration,
    entries: Sequence[Entry],
    limits: Sequence[float | None],
) -> Exploration:
    """The exploration with what the planners find in the same tables, and a row of comparison for each.

    Args:
        limits: memory per device that they are given, bytes; None for all trade-offs they know.
    """
    frontier, keys = exploration.points, searched.problem.graph.atoms.graph.parameters
    tables = tuple(
        TableSpace(s.mesh, s.tables, names)
        # Spaces of pipelines come behind those that were searched.
        for s, names in zip(searched.spaces, exploration.spaces, strict=False)
    )
    # Store and ranks are opened only for planners that price anew, and closed after all have run.
    with ExitStack() as stack:
        kinds, prices, staged = {entry.kind for entry in entries}, None, None
        counts: tuple[int, ...] = (1,)
        costs = _costs(session, searched, stack) if kinds - {"sharded"} else searched.costs
        if "pipelined" in kinds:
            staged = PipelineTask(
                searched.problem, session.cluster, costs, session.settings, len(exploration.spaces)
            )
            exploration = replace(exploration, spaces=(*exploration.spaces, *staged.spaces))
        if "placed" in kinds:
            graph, constraints = searched.problem.graph, session.settings.constraints
            prices = PlacedPrices(graph, session.cluster, costs, constraints)
            counts, names = micro_batch_counts(searched.problem, session.settings), _names(keys)
            placed = (placed_space(session.cluster, names, count) for count in counts)
            exploration = replace(exploration, spaces=(*exploration.spaces, *placed))
        question = PlanningTask(
            searched.problem, session.cluster, tables, exploration, prices, staged, counts
        )
        seed = exploration.model.seed
        rows, others = compare(question, entries, limits, frontier, seed, session.progress)
    others = certified(searched.spaces, others)
    # The simulator's figures differ from the tables' sums by strategy, so that another planner's point may
    # lie below the frontier that was tracked in those sums.
    merged = unbeaten(reduce_points([*frontier, *others], lambda p: (p.memory_bytes, p.time_s)))
    return replace(
        exploration,
        points=merged,
        others=others,
        comparison=tuple(row.to_dict() for row in rows),
        recorded=record_used(searched, exploration.spaces, (*frontier, *others)),
    )


def _names(parameters: Sequence[Tensor]) -> dict[str, str]:
    """Per parameter of the graph the model's own name."""
    return {tensor.name: str(tensor.key) for tensor in parameters}


def _costs(session: Session, searched: Searched, stack: ExitStack) -> CostSource:
    """Costs of further work, from where the tables' came; ``stack`` closes what they need."""
    store = stack.enter_context(session.open_store())
    pool = stack.enter_context(session.open_ranks())
    return replace(searched.costs, store=store, pool=pool, progress=session.progress)
