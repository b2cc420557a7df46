"""What every planner is given: the same tables, the same judge, the same way to write a plan down.

A planner picks :class:`Selection`\\ s from the tables; the judge plays them, and what is fast enough for its
memory becomes a :class:`~tensoropt.plan.Plan`. No planner prices itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.tables import CostTables
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.placement import SimulatedPlacement, simulate_placement
from tensoropt.placement.points import placed_point
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.plan import Plan
from tensoropt.plan import problem as prepared
from tensoropt.plan.evaluate import CHUNK, evaluate
from tensoropt.plan.exploration import Exploration, Point, Space, reduce_points
from tensoropt.planners.placed.placing import PlacedAnswer
from tensoropt.simulate.overlap import overlap_of
from tensoropt.units import format_bytes, format_seconds

NOTABLE = 0.05
"""How much longer than expected a step takes before a note says so."""


@dataclass(frozen=True)
class TableSpace:
    """Tables of one mesh and micro-batch count, and the names of what can be chosen in them."""

    mesh: Mesh
    tables: CostTables
    names: Space

    @property
    def micro_batches(self) -> int:
        return self.tables.mesh[0]


@dataclass(frozen=True)
class Selection:
    """A strategy by its indices in one space's tables.

    Attributes:
        space: index into :attr:`Problem.spaces`.
        choice: per variable its configuration.
        options: per variable its option; absent means the first.
        notes: what the planner says of it (a solver's gap, a budget that ran out).
    """

    space: int
    choice: Mapping[str, int]
    options: Mapping[Any, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A model on a cluster, priced: the question every planner answers.

    Attributes:
        prepared: the captured, grouped model.
        spaces: one per mesh and micro-batch count.
        base: an exploration of the same model; it knows how to write plans. Where placing planners are asked
            its last space is theirs.
        placed: what operators cost on single devices; None where no placing planner is asked.
    """

    prepared: prepared.Problem
    cluster: Cluster
    spaces: tuple[TableSpace, ...]
    base: Exploration
    placed: PlacedPrices | None = None

    @cached_property
    def placing(self) -> PricedGraph:
        """The model as placing planners see it, with nothing split."""
        if self.placed is None:
            raise TensorOptError("this problem was made without prices for placing planners")
        return self.placed.price()

    @property
    def optimizer(self) -> str:
        return str(self.base.settings["optimizer"])

    @property
    def search_s(self) -> float:
        """Seconds that tracking the frontier took; 0 where the exploration does not say."""
        return float(self.base.report.get("seconds", {}).get("search", 0.0))

    def points(self, planner: str, selections: Sequence[Selection]) -> list[Point]:
        """The selections as the judge sees them, in their order."""
        found: dict[int, Point] = {}
        for number, space in enumerate(self.spaces):
            mine = [i for i, s in enumerate(selections) if s.space == number]
            chosen = [(selections[i].choice, selections[i].options) for i in mine]
            overlap = overlap_of(self.cluster, space.mesh)
            judged = evaluate(space.tables, chosen, overlap)
            for at, i in enumerate(mine):
                memory, compute, communication = space.tables.breakdown(*chosen[at])
                found[i] = judged[at // CHUNK].point(
                    at % CHUNK,
                    space.names,
                    number,
                    additive=(memory, compute + communication),
                    planner=planner,
                )
        return [found[i] for i in range(len(selections))]

    def plan(self, point: Point, notes: Iterable[str] = ()) -> Plan:
        """A judged point as a plan."""
        plan = self.base.plan_of(point)
        told = {"notes": list(notes)} if notes else {}
        return plan.model_copy(update={"settings": {**plan.settings, **told}})

    def answer(self, planner: str, selections: Sequence[Selection], limit: float | None) -> tuple[Found, ...]:
        """What remains of the selections: all trade-offs, or with a limit the fastest within it.

        Raises:
            InfeasibleError: none fits; says what the leanest needs.
        """
        points = self.points(planner, selections)
        judged = [Found(p, s.notes) for p, s in zip(points, selections, strict=True)]
        kept = reduce_points(judged, lambda found: (found.point.memory_bytes, found.point.time_s))
        if limit is None:
            return kept
        fitting = [found for found in kept if found.point.memory_bytes <= limit]
        if not fitting:
            leanest = format_bytes(kept[0].point.memory_bytes)
            raise InfeasibleError(
                f"{planner} finds no plan within {format_bytes(limit)}; its leanest needs {leanest}"
            )
        return (fitting[-1],)

    def placed_answer(self, planner: str, graph: PricedGraph, answer: PlacedAnswer) -> Found:
        """A placement as the judge sees it."""
        simulated = simulate_placement(graph.problem, answer.placement)
        notes = (*answer.notes, *disappointed(answer, simulated), *graph.prices.limits.notes)
        space = len(self.base.spaces) - 1
        return Found(placed_point(graph, simulated, planner=planner, space=space, notes=notes), notes)


def disappointed(answer: PlacedAnswer, simulated: SimulatedPlacement) -> tuple[str, ...]:
    """A note where the judge's step takes longer than the method expected, with the busiest link."""
    expected = answer.expected_s
    if expected is None or simulated.time_s <= expected * (1 + NOTABLE):
        return ()
    lane, busy = simulated.busiest_lane
    return (
        f"it expects a step of {format_seconds(expected)}, the simulator finds "
        f"{format_seconds(simulated.time_s)}: messages queue, which its estimate does not count; {lane} is busy for {format_seconds(busy)}",
    )


class Found(NamedTuple):
    """A judged point, and what its planner says of it."""

    point: Point
    notes: tuple[str, ...]


@dataclass
class Deadline:
    """Seconds a planner may still spend; ``passed`` is asked between steps."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - (time.monotonic() - self.started))


def labels_of(space: TableSpace, name: str, index: int) -> tuple[str, ...]:
    """Per mesh axis (without the micro-batches) what a group's configuration splits."""
    return tuple(space.names.labels(name, index))
