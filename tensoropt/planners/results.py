"""Simulate a method's selections into points: the same simulator and the same notes for every planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.evaluation.evaluate import CHUNK, Evaluator
from tensoropt.pipeline.points import pipelined_point
from tensoropt.placement import simulate_placement
from tensoropt.placement.points import placed_point
from tensoropt.placement.prices import PricedGraph
from tensoropt.plan.plan import Plan
from tensoropt.plan.point import Point, reduce_points
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pipelined.common.task import PipelinedAnswer
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.simulate.candidates import overlap_of
from tensoropt.units import format_bytes


class SimulatedPoint(NamedTuple):
    """A simulated point, with its planner's notes."""

    point: Point
    notes: tuple[str, ...]


def simulated_points(task: PlanningTask, planner: str, selections: Sequence[Selection]) -> list[Point]:
    """Return the simulated points of the selections, in their order."""
    points: dict[int, Point] = {}
    # Space by space, since ``evaluate`` takes many strategies of the same tables at once, CHUNK of them to a
    # result.
    for number, space in enumerate(task.spaces):
        of_space = [i for i, s in enumerate(selections) if s.space == number]
        if not of_space:
            continue
        chosen = [(selections[i].choice, selections[i].options) for i in of_space]
        overlap = overlap_of(task.cluster, space.mesh, beside=space.tables.prices.beside)
        simulated = Evaluator(space.tables, overlap)(chosen)
        for position, i in enumerate(of_space):
            memory, compute, communication = space.tables.breakdown(*chosen[position])
            points[i] = simulated[position // CHUNK].point(
                position % CHUNK,
                space.names,
                number,
                additive=(memory, compute + communication),
                planner=planner,
            )
    return [points[i] for i in range(len(selections))]


def plan_of(task: PlanningTask, point: Point, notes: Iterable[str] = ()) -> Plan:
    """Return a simulated point as a plan, with its planner's notes among the settings."""
    plan = task.base.plan(point)
    settings = {"notes": list(notes)} if notes else {}
    return plan.model_copy(update={"settings": {**plan.settings, **settings}})


def best_of(
    task: PlanningTask, planner: str, selections: Sequence[Selection], limit: float | None
) -> tuple[SimulatedPoint, ...]:
    """Return the best of the selections: all trade-offs of each kind, or with a limit the fastest within it.

    Raises:
        InfeasibleError: none fits; the message says how much the leanest needs.
    """
    points = simulated_points(task, planner, selections)
    of_kind: dict[str, list[SimulatedPoint]] = {}
    for point, selection in zip(points, selections, strict=True):
        of_kind.setdefault(selection.kind, []).append(SimulatedPoint(point, selection.notes))
    kept = [one for simulated in of_kind.values() for one in reduce_points(simulated, _costs)]
    if limit is not None:
        return _best(planner, kept, limit)
    return tuple(sorted(kept, key=_costs))


def _costs(one: SimulatedPoint) -> tuple[float, float]:
    return one.point.memory_bytes, one.point.time_s


def best_pipelines(
    task: PlanningTask, planner: str, answers: Iterable[PipelinedAnswer], limit: float | None
) -> tuple[SimulatedPoint, ...]:
    """Return the best of some pipelines, by the rule of :func:`best_of`.

    Raises:
        InfeasibleError: none fits; the message says how much the leanest needs.
    """
    kept = reduce_points(
        [*answers], lambda answer: (answer.evaluation.memory_bytes, answer.evaluation.time_s)
    )
    simulated = [
        SimulatedPoint(
            pipelined_point(
                evaluation,
                mesh,
                space=task.staging.space_of(mesh, evaluation.strategy.micro_batches),
                planner=planner,
            ),
            (),
        )
        for evaluation, mesh in kept
    ]
    if not simulated:
        raise InfeasibleError(f"{planner} finds no plan: it allows no strategy for some stage; use another")
    return _best(planner, simulated, limit)


def _best(
    planner: str, simulated: Sequence[SimulatedPoint], limit: float | None
) -> tuple[SimulatedPoint, ...]:
    kept = reduce_points(simulated, _costs)
    if limit is None:
        return kept
    fitting = [simulated_point for simulated_point in kept if simulated_point.point.memory_bytes <= limit]
    if not fitting:
        leanest = format_bytes(kept[0].point.memory_bytes)
        raise InfeasibleError(
            f"{planner} finds no plan within {format_bytes(limit)}; its leanest needs {leanest}: raise it"
        )
    return (fitting[-1],)


def _simulated_answer(
    task: PlanningTask, planner: str, graph: PricedGraph, answer: PlacedAnswer
) -> SimulatedPoint:
    """Return a placement with its simulated figures and its planner's notes."""
    simulated = simulate_placement(graph.problem, answer.placement)
    space = task.placed_space(simulated.micro_batches)
    point = placed_point(graph, simulated, planner=planner, space=space)
    return SimulatedPoint(point, (*answer.notes, *graph.prices.limits.notes))


def best_placements(
    task: PlanningTask,
    planner: str,
    place: Callable[[PricedGraph], Sequence[tuple[PricedGraph, PlacedAnswer]]],
    limit: float | None,
    counts: Sequence[int],
) -> tuple[SimulatedPoint, ...]:
    """Return the best of a method's placements for each micro-batch count, by the rule of :func:`best_of`.

    Args:
        place: runs the method on a graph; returns its answers, each with the graph as the method cut it.

    Raises:
        TensorOptError: the method refuses all counts; the error is the refusal of the last.
    """
    simulated: list[SimulatedPoint] = []
    refusals: dict[int, TensorOptError] = {}
    for count in counts:
        try:
            whole = task.placing(count)
            _check_room_for_tensors(planner, whole, limit)
            answers = place(whole)
        except (InfeasibleError, UnsuitableError) as refusal:
            refusals[count] = refusal
            continue
        simulated += [_simulated_answer(task, planner, graph, answer) for graph, answer in answers]
    if not simulated:
        raise refusals[counts[-1]]
    notes = tuple(f"with {count} micro-batches: {refusal}" for count, refusal in refusals.items())
    return tuple(
        candidate._replace(notes=(*candidate.notes, *notes)) for candidate in _best(planner, simulated, limit)
    )


def _check_room_for_tensors(planner: str, graph: PricedGraph, limit: float | None) -> None:
    terms = graph.problem.devices.terms
    overhead_bytes = sum(terms.values())
    if limit is not None and limit < overhead_bytes:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
        raise InfeasibleError(
            f"{planner} finds no plan within {format_bytes(limit)}: {format_bytes(overhead_bytes)} of every "
            f"device are taken before any tensor ({parts}); raise the limit"
        )
