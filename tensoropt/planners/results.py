"""Simulate the strategies that planners choose, all by one simulator, and keep the best as points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.evaluation.evaluate import CHUNK, Evaluator
from tensoropt.pipeline.points import pipelined_point
from tensoropt.placement import simulate_placement
from tensoropt.placement.points import placed_point
from tensoropt.placement.prices import PricedGraph
from tensoropt.plan.point import Point, reduce_points
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pipelined.common.task import PipelinedAnswer
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.simulate.candidates import overlap_of
from tensoropt.units import format_bytes


class SimulatedPoint(NamedTuple):
    """A simulated point with its planner's notes. ``kind``: a variant of the method, such as a ZeRO stage."""

    point: Point
    notes: tuple[str, ...]
    kind: str = ""


def simulated_points(task: PlanningTask, planner: str, selections: Sequence[Selection]) -> list[Point]:
    """Return the simulated points of the selections, in their order."""
    points: dict[int, Point] = {}
    # Space by space, since ``evaluate`` takes many strategies of the same tables at once, CHUNK of them to a
    # result.
    for number, space in enumerate(task.spaces):
        chosen = {i: (s.choice, s.options) for i, s in enumerate(selections) if s.space == number}
        if not chosen:
            continue
        overlap = overlap_of(task.cluster, space.mesh, beside=space.tables.prices.beside)
        simulated = Evaluator(space.tables, overlap)([*chosen.values()])
        for position, (i, strategy) in enumerate(chosen.items()):
            memory, compute, communication = space.tables.breakdown(*strategy)
            additive = memory, compute + communication
            chunk, row = divmod(position, CHUNK)
            points[i] = simulated[chunk].point(row, space.names, number, additive=additive, planner=planner)
    return [points[i] for i in range(len(selections))]


def best_of(planner: str, found: Iterable[SimulatedPoint], limit: float | None) -> tuple[SimulatedPoint, ...]:
    """Return the non-dominated points of each kind; with a limit in bytes, only the fastest point within it.

    Raises:
        InfeasibleError: no point is within the limit. The message gives the least memory that a point needs.
    """
    # The best of each kind of plan, so that all stages of ZeRO can be compared.
    of_kinds: dict[str, list[SimulatedPoint]] = {}
    for one in found:
        of_kinds.setdefault(one.kind, []).append(one)
    kept = sorted((one for of in of_kinds.values() for one in reduce_points(of, _costs)), key=_costs)
    if limit is None:
        return tuple(kept)
    fitting = [one for one in reduce_points(kept, _costs) if one.point.memory_bytes <= limit]
    if not fitting:
        leanest = format_bytes(kept[0].point.memory_bytes)
        raise InfeasibleError(
            f"{planner} finds no plan within {format_bytes(limit)}; its leanest plan needs {leanest}; raise "
            "the limit"
        )
    return (fitting[-1],)


def _costs(one: SimulatedPoint) -> tuple[float, float]:
    return one.point.memory_bytes, one.point.time_s


def sharded(task: PlanningTask, planner: str, selections: Sequence[Selection]) -> list[SimulatedPoint]:
    """Return the selections of a sharding method as simulated points."""
    points = simulated_points(task, planner, selections)
    return [SimulatedPoint(p, s.notes, s.kind) for p, s in zip(points, selections, strict=True)]


def pipelined(task: PlanningTask, planner: str, answers: Sequence[PipelinedAnswer]) -> list[SimulatedPoint]:
    """Return a method's non-dominated pipelines as simulated points; InfeasibleError if it found none."""
    if not answers:
        raise InfeasibleError(f"{planner} finds no plan: it has no strategy for a stage; use another planner")
    found = []
    for evaluation, mesh in reduce_points(answers, lambda one: (one[0].memory_bytes, one[0].time_s)):
        space = task.staging.space_of(mesh, evaluation.strategy.micro_batches)
        found.append(SimulatedPoint(pipelined_point(evaluation, mesh, space=space, planner=planner), ()))
    return found


def placed(
    task: PlanningTask,
    planner: str,
    place: Callable[[PricedGraph], Sequence[tuple[PricedGraph, PlacedAnswer]]],
    limit: float | None,
    one_batch: str,
) -> list[SimulatedPoint]:
    """Return a method's placements for each micro-batch count as simulated points.

    Args:
        place: runs the method on a graph; returns its placements, each with its graph of cut operators.
        one_batch: the reason why the method cannot run several micro-batches; "" if it can.

    Raises:
        TensorOptError: the method fails for all counts. The error is that for the last count.
    """
    counts, notes = task.placed_counts, list[str]()
    if one_batch and counts != (1,):
        if 1 not in counts:
            raise UnsuitableError(
                f"{planner} runs one micro-batch only: {one_batch}; you asked for "
                f"{', '.join(map(str, counts))}, allow 1 as well or use another planner"
            )
        counts, notes = (1,), [f"runs one micro-batch only: {one_batch}"]
    answers: list[tuple[PricedGraph, PlacedAnswer]] = []
    refusals: dict[int, TensorOptError] = {}
    for count in counts:
        try:
            graph = task.placing(count)
            _check_room_for_tensors(planner, graph, limit)
            answers += place(graph)
        except (InfeasibleError, UnsuitableError) as refusal:
            refusals[count] = refusal
    if not answers:
        raise refusals[counts[-1]]
    more = (*(f"with {count} micro-batches: {refusal}" for count, refusal in refusals.items()), *notes)
    return [_simulated_answer(task, planner, *answer, more) for answer in answers]


def _simulated_answer(
    task: PlanningTask, planner: str, graph: PricedGraph, answer: PlacedAnswer, more: tuple[str, ...] = ()
) -> SimulatedPoint:
    """Simulate a placement; return its point, with its planner's notes followed by ``more``."""
    simulated = simulate_placement(graph.problem, answer.placement)
    space = task.placed_space(simulated.micro_batches)
    point = placed_point(graph, simulated, planner=planner, space=space)
    return SimulatedPoint(point, (*answer.notes, *graph.prices.limits.notes, *more))


def _check_room_for_tensors(planner: str, graph: PricedGraph, limit: float | None) -> None:
    terms = graph.problem.devices.terms
    overhead_bytes = sum(terms.values())
    if limit is not None and limit < overhead_bytes:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
        raise InfeasibleError(
            f"{planner} finds no plan within {format_bytes(limit)}: {format_bytes(overhead_bytes)} of every "
            f"device are taken before any tensor ({parts}); raise the limit"
        )
