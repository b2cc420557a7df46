"""OS-DPOS: DPOS, with operators of the critical path cut into pieces as long as that makes the step shorter.

X. Yi et al., *Fast Training of Deep Learning Models over Multiple GPUs* (FastT), Middleware 2020, section
5.2, algorithm 2. Cutting puts a split node before the pieces and a concatenation after them (SplitOperation);
operators that are cut in the same way on both sides of an edge need neither.

The paper starts from the data-parallel graph if the model fits on one device, otherwise from the model
itself. The data-parallel graph is the batch of every operator cut into as many pieces as there are devices,
or the next number that divides it. Here both are tried, as neither is better for all models: the answer is
the one that is faster when simulated, and a note has both. An operator that is already in pieces is cut anew
as a whole: the same dims and counts are tried for it instead of its current ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.placement.graph import GroupSplit, Splits
from tensoropt.planners.placed.common.task_ranks import placed_ranks
from tensoropt.planners.placed.common.units import (
    MemoryBook,
    NoRoomError,
    PlacedAnswer,
    Units,
    memory_limits,
    place_within_memory,
    units_of,
)
from tensoropt.planners.placed.dpos import DposSchedule, schedule_by_ranks
from tensoropt.units import format_seconds


class Splittable(Protocol):
    """A problem whose operators can be cut."""

    @property
    def problem(self) -> PlacementProblem: ...

    def whole_of(self, operator: int) -> str | None:
        """Return the operator that this one is, or is a piece of; None for one that only moves data or holds
        parameters.
        """
        ...

    def split_choices(self, operator: int) -> tuple[GroupSplit, ...]:
        """Return the ways in which an operator can be cut; none if ``whole_of`` is None."""
        ...

    def data_parallel(self) -> Splits:
        """Return cuts of everything whose batch can be cut, into as many pieces as there are devices or the
        nearest possible number."""
        ...

    def split(self, splits: Splits) -> Self:
        """Return the problem with these cuts in addition to those already made, replacing those of the same
        operators.
        """
        ...


S = TypeVar("S", bound=Splittable)


@dataclass(frozen=True)
class _Trial(Generic[S]):
    graph: S
    units: Units
    schedule: DposSchedule


def placements(graph: S, memory_limit_bytes: float | None, seed: int) -> tuple[tuple[S, PlacedAnswer]]:
    """Return the graph as it was cut with its placement, from the start that is faster when simulated.

    Raises:
        InfeasibleError: an operator has no room on any device, whichever the start.
    """
    found: list[tuple[float, str, S, PlacedAnswer]] = []
    refusals: list[InfeasibleError] = []
    outcomes: list[str] = []
    for start, name in _starts(graph, memory_limit_bytes):
        try:
            split, answer = _place_from(start, memory_limit_bytes)
        except InfeasibleError as refusal:
            refusals.append(refusal)
            outcomes.append(f"{name}: no room")
            continue
        time_s = simulate_placement(split.problem, answer.placement).time_s
        found.append((time_s, name, split, answer))
        outcomes.append(f"{name}: {format_seconds(time_s)}")
    if not found:
        raise refusals[0]
    _, name, split, answer = min(found, key=lambda each: each[0])  # of equals, the published one
    both = (f"the published start is {'; the other is '.join(outcomes)}",) if len(outcomes) > 1 else ()
    return ((split, replace(answer, notes=(f"started from {name}", *both, *answer.notes))),)


def _starts(graph: S, limit: float | None) -> list[tuple[S, str]]:
    """Return the graphs to begin with, by what they are, the published one (section 5.2) first.

    Either may have no room where the other has: parameters are not replicated here, so that pieces may fit
    where operators do not.
    """
    batch = graph.data_parallel()
    if not batch:
        return [(graph, "the model itself, as its batch cannot be cut")]
    count = next(iter(batch.values()))[1]
    parallel = graph.split(batch), f"data parallelism (the batch of {len(batch)} groups cut in {count})"
    whole = graph, "the model itself"
    bytes_in_all = float(units_of(graph.problem).bytes.sum())
    fits = bool((memory_limits(graph.problem, limit) >= bytes_in_all).any())
    return [parallel, whole] if fits else [whole, parallel]


def _place_from(start: S, limit: float | None) -> tuple[S, PlacedAnswer]:
    # As in retry.py, if counting what is in flight leaves no room, that is left to the simulator.
    counts_transients, first = True, _trial(start, limit, True)
    if first is None:
        counts_transients, first = False, _trial(start, limit, False)
    cut: dict[str, GroupSplit] = {}
    if first is None:
        graph, units = start, units_of(start.problem)
    else:
        best, cut = _search(first, limit, counts_transients)
        graph, units = best.graph, best.units

    def attempt(memory: MemoryBook) -> PlacedAnswer:
        return schedule_by_ranks(graph.problem, units, memory).answer

    answer = place_within_memory("os_dpos", graph.problem, units, limit, attempt)
    cuts = [f"{name} along {dim} into {count}" for name, (dim, count) in cut.items()]
    listed = ", ".join(cuts[:3]) + (f" and {len(cuts) - 3} more" if len(cuts) > 3 else "")
    notes = (f"cut on the critical path: {listed or 'nothing'}", *answer.notes)
    return graph, replace(answer, notes=notes)


def _trial(graph: S, limit: float | None, counts_transients: bool) -> _Trial[S] | None:
    """Run algorithm 1 on a graph, with or without counting tensors in flight; return None if it finds no
    room.
    """
    units = units_of(graph.problem)
    try:
        schedule = schedule_by_ranks(
            graph.problem, units, MemoryBook.empty(memory_limits(graph.problem, limit), counts_transients)
        )
    except NoRoomError:
        return None
    return _Trial(graph, units, schedule)


def _search(
    best: _Trial[S], limit: float | None, counts_transients: bool
) -> tuple[_Trial[S], dict[str, GroupSplit]]:
    """Run lines 4 to 14: cut the operators of the critical path once, the longest first, until a cut gains
    nothing.
    """
    cut: dict[str, GroupSplit] = {}
    for name, operator in _longest_first(best):
        tries = [
            (choice, tried)
            for choice in operator
            if (tried := _trial(best.graph.split({name: choice}), limit, counts_transients)) is not None
        ]
        if not tries:
            continue
        choice, attempt = min(tries, key=lambda item: item[1].schedule.finish_s)
        # The paper stops at the first operator whose best cut gains nothing and does not try the shorter
        # ones.
        if attempt.schedule.finish_s >= best.schedule.finish_s:
            break
        best, cut[name] = attempt, choice
    return best, cut


def _longest_first(start: _Trial[S]) -> list[tuple[str, tuple[GroupSplit, ...]]]:
    """Return the possible cuts on the critical path under this placement, by descending computation time
    (lines 4, 5).
    """
    graph, problem = start.graph, start.graph.problem
    device = start.schedule.placement.device
    seconds: dict[str, float] = {}
    choices: dict[str, tuple[GroupSplit, ...]] = {}
    for operator in placed_ranks(problem, device).path:
        name = graph.whole_of(operator)
        if name is None or name in seconds:
            continue
        splits = graph.split_choices(operator)
        if splits:
            place = operator, device[operator]
            seconds[name] = float(problem.forward_s[place] + problem.backward_s[place])
            choices[name] = splits
    return [(name, choices[name]) for name in sorted(seconds, key=lambda n: -seconds[n])]
