"""OS-DPOS: DPOS, and operators of the critical path cut into pieces as long as that makes the step shorter.

X. Yi et al., *Fast Training of Deep Learning Models over Multiple GPUs* (FastT), Middleware 2020, section
5.2, algorithm 2. Cutting puts a split node before the pieces and a concatenation behind them
(SplitOperation); what is cut alike on both sides of an edge needs neither.

The start is the model itself, or where it fits on one device the data-parallel graph: the batch of every
operator cut into as many pieces as there are devices. An operator that is a piece already is cut anew as a
whole: the same dims and counts are tried for it instead of what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from tensoropt.plan.placed import PlacementProblem
from tensoropt.planners.dpos import Sequenced, sequence
from tensoropt.planners.placing import (
    Attempt,
    Memory,
    NoRoomError,
    PlacedAnswer,
    Units,
    ceilings,
    settle,
    units_of,
)
from tensoropt.planners.ranks import placed_ranks

Splits = Mapping[str, tuple[str, int]]
"""What is cut -> (dim, number of pieces)."""


class Splittable(Protocol):
    """A problem whose operators can be cut."""

    @property
    def problem(self) -> PlacementProblem: ...

    def whole_of(self, operator: int) -> str | None:
        """What an operator is, or is a piece of; None for what only moves data or holds parameters."""
        ...

    def choices(self, operator: int) -> tuple[tuple[str, int], ...]:
        """The (dim, number of pieces) by which it can be cut; none where ``whole_of`` is None."""
        ...

    def data_parallel(self) -> Splits:
        """Everything whose batch divides by the number of devices, cut so."""
        ...

    def split(self, splits: Splits) -> Self:
        """With these cuts beside those made, instead of those of the same operators."""
        ...


S = TypeVar("S", bound=Splittable)


@dataclass(frozen=True)
class _Try(Generic[S]):
    """A graph and what DPOS makes of it."""

    graph: S
    units: Units
    found: Sequenced


def place_split(graph: S, memory_limit_bytes: float | None, seed: int) -> tuple[S, PlacedAnswer]:
    """(the graph as it was cut, its placement).

    Raises:
        InfeasibleError: an operator has no room on any device, whatever was cut.
    """
    best, notes = _start(graph, memory_limit_bytes)
    if best is None:
        units = units_of(graph.problem)
        return graph, settle(
            "os_dpos", graph.problem, units, memory_limit_bytes, _attempt(graph.problem, units)
        )
    best, cut = _search(best, memory_limit_bytes)
    answer = settle(
        "os_dpos",
        best.graph.problem,
        best.units,
        memory_limit_bytes,
        _attempt(best.graph.problem, best.units),
    )
    told = [f"{name} along {dim} into {count}" for name, (dim, count) in cut.items()]
    listed = ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
    return best.graph, PlacedAnswer(
        answer.placement, (*notes, f"cut on the critical path: {listed or 'nothing'}", *answer.notes)
    )


def _attempt(problem: PlacementProblem, units: Units) -> Attempt:
    return lambda memory: (sequence(problem, units, memory).placement, ())


def _try(graph: S, limit: float | None) -> _Try[S] | None:
    """Algorithm 1 on a graph; None where it finds no room."""
    units = units_of(graph.problem)
    try:
        found = sequence(graph.problem, units, Memory.empty(ceilings(graph.problem, limit)))
    except NoRoomError:
        return None
    return _Try(graph, units, found)


def _start(graph: S, limit: float | None) -> tuple[_Try[S] | None, tuple[str, ...]]:
    """The graph to begin with (section 5.2), and what is said of it."""
    held = float(units_of(graph.problem).bytes.sum())
    if (ceilings(graph.problem, limit) >= held).any():
        batch = graph.data_parallel()
        if batch:
            parallel = _try(graph.split(batch), limit)
            if parallel is not None:
                return parallel, (f"started from data parallelism: the batch of {len(batch)} groups cut",)
        return _try(graph, limit), ("started from the model itself: its batch cannot be cut",)
    return _try(graph, limit), ("started from the model itself: it fits on no single device",)


def _search(best: _Try[S], limit: float | None) -> tuple[_Try[S], dict[str, tuple[str, int]]]:
    """Lines 4 to 14: the critical path once, its longest operators first, until one gains nothing."""
    cut: dict[str, tuple[str, int]] = {}
    for name, operator in _longest_first(best):
        tries = [
            (choice, tried)
            for choice in operator
            if (tried := _try(best.graph.split({name: choice}), limit)) is not None
        ]
        if not tries:
            continue
        choice, found = min(tries, key=lambda item: item[1].found.finish_s)
        if found.found.finish_s >= best.found.finish_s:
            break
        best, cut[name] = found, choice
    return best, cut


def _longest_first(start: _Try[S]) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    """What can be cut on the critical path under this placement, by descending computation time (lines 4,
    5).
    """
    graph, problem = start.graph, start.graph.problem
    device = start.found.placement.device
    seconds: dict[str, float] = {}
    choices: dict[str, tuple[tuple[str, int], ...]] = {}
    for operator in placed_ranks(problem, device).path:
        name = graph.whole_of(operator)
        if name is None or name in seconds:
            continue
        found = graph.choices(operator)
        if found:
            at = operator, device[operator]
            seconds[name] = float(problem.forward_s[at] + problem.backward_s[at])
            choices[name] = found
    return [(name, choices[name]) for name in sorted(seconds, key=lambda n: -seconds[n])]
