"""Functions that run published planners on an exploration's cost tables, and cost saved points again."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace

from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import micro_batch_counts
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.export import compared, limits_asked
from tensoropt.placement.points import placed_space
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.point import reduce_points, unbeaten
from tensoropt.planners.compare import compare
from tensoropt.planners.pipelined.common.task import PipelineTask
from tensoropt.planners.registry import Entry
from tensoropt.planners.tables import TableSpace
from tensoropt.planners.task import PlanningTask
from tensoropt.report.rebuilt import StrategyOnMesh, strategy_on
from tensoropt.session.evaluation import certified, only_used_spaces, open_costs, record_used
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session


@dataclass(frozen=True)
class Recosted:
    """A saved point's memory and step time at other costs; ``reason`` says why if they could not be found."""

    index: int
    memory_bytes: float | None
    time_s: float | None
    reason: str = ""


def recosted(
    session: Session, searched: Searched, old: Exploration, indices: Sequence[int]
) -> tuple[Recosted, ...]:
    """Return the memory and step time of points of an old exploration, at the costs of a new search.

    Both must be of the same operator graph.
    """
    graph = searched.problem.graph
    plans: dict[int, StrategyOnMesh] = {}
    answers: dict[int, Recosted] = {}
    for index in indices:
        try:
            plans[index] = strategy_on(old.plan(index), graph, session.cluster)
        except TensorOptError as error:
            answers[index] = Recosted(index, None, None, str(error))
    with ExitStack() as stack:
        costs = open_costs(session, searched, stack)
        # Old strategies need not be among those that were searched today.
        works = {work.key: work for plan in plans.values() for _, work in plan.works(session.cluster)}
        with suppress(TensorOptError):  # raised again below, for the plans that need what cannot be found
            costs.facts.find(works.values())
            costs.timings.measure(works)
        for index, plan in plans.items():
            try:
                answers[index] = Recosted(index, *plan.simulated(costs))
            except TensorOptError as error:
                answers[index] = Recosted(index, None, None, str(error))
    return tuple(answers[index] for index in indices)


def with_planners(
    session: Session,
    searched: Searched,
    exploration: Exploration,
    entries: Sequence[Entry],
    limits: Sequence[float | None],
) -> Exploration:
    """Return the exploration with the plans that published planners make from its cost tables, and with each
    planner's result as its ``comparison``.

    Args:
        entries: the planners to run.
        limits: memory limits in bytes per device; each planner runs once per limit. Without a limit (None),
            it returns every trade-off of memory and time that it finds.
    """
    frontier = exploration.points
    # Store and ranks are opened only for planners that price anew, and closed after all have run.
    with ExitStack() as stack:
        task = planning_task(session, searched, exploration, {entry.kind for entry in entries}, stack)
        seed = exploration.model.seed
        rows, others = compare(task, entries, limits, seed, session.progress)
    others = certified(searched.spaces, others)
    # The simulator's figures differ from the tables' sums by strategy, so that another planner's point may
    # lie below the frontier that was tracked in those sums.
    merged = unbeaten(reduce_points([*frontier, *others]))
    # What ran beside the search stays, unless it was asked again.
    asked = {entry.name for entry in entries}
    before = tuple(point for point in exploration.others if point.planner not in asked)
    found = replace(
        exploration, spaces=task.base.spaces, points=merged, others=(*before, *others), comparison=rows
    )
    figures = [row for limit in limits_asked(found) for row in compared(found, limit)]
    found = replace(found, comparison=tuple({**asdict(row), "notes": list(row.notes)} for row in figures))
    return only_used_spaces(replace(found, costs=record_used(session, searched, found)))


def planning_task(
    session: Session, searched: Searched, exploration: Exploration, kinds: Set[str], stack: ExitStack
) -> PlanningTask:
    """Return the input of planners of these kinds of plans: the exploration's cost tables and other costs.

    The exploration in this input, ``base``, gets further ``spaces`` for the meshes of pipelines and placed
    plans that these planners may find.

    Args:
        stack: closes the profile store and the ranks that are opened to measure further operators.
    """
    tables = tuple(
        TableSpace(s.mesh, s.tables, names)
        # Spaces of pipelines and of placed plans come after those that were searched.
        for s, names in zip(searched.spaces, exploration.spaces, strict=False)
    )
    spaces, staged, prices = list(exploration.spaces), None, None
    counts: tuple[int, ...] = (1,)
    costs = open_costs(session, searched, stack) if kinds - {"sharded"} else searched.costs
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
    return PlanningTask(
        searched.problem, session.cluster, tables, base, prices, staged, counts, refusal=searched.refusal
    )
