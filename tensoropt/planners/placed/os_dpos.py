"""OS-DPOS: DPOS, with operators of the critical path cut into pieces as long as that makes the step shorter.

X. Yi et al., *Fast Training of Deep Learning Models over Multiple GPUs* (FastT), Middleware 2020, section
5.2, algorithm 2. A cut puts a split node before the pieces and a concatenation after them (SplitOperation).
An edge between two operators that are cut in the same way needs neither.

The paper starts from the data-parallel graph if the model fits on one device, otherwise from the model
itself. The data-parallel graph is the batch of every operator cut into as many pieces as there are devices,
or the next lower number that divides it. An operator that is already in pieces is cut anew as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.placement.graph import GroupSplit
from tensoropt.placement.prices import PricedGraph
from tensoropt.planners.placed.common import units
from tensoropt.planners.placed.common.task_ranks import placed_ranks
from tensoropt.planners.placed.dpos import DposSchedule, schedule_by_ranks


@dataclass(frozen=True)
class _Trial:
    graph: PricedGraph
    schedule: DposSchedule


def placements(
    graph: PricedGraph, memory_limit_bytes: float | None, seed: int
) -> tuple[tuple[PricedGraph, units.PlacedAnswer]]:
    """Return the graph with the cut operators, and its placement.

    Raises:
        InfeasibleError: an operator has no room on any device.
    """
    start, name = _start(graph, memory_limit_bytes)
    cut: dict[str, GroupSplit] = {}
    # If counting tensors in flight leaves no room, they are left to the simulator.
    for counts in (True, False):
        if (first := _trial(start, memory_limit_bytes, counts)) is not None:
            best, cut = _search(first, memory_limit_bytes, counts)
            start = best.graph
            break
    problem = start.problem
    answer = units.place_within_memory(
        "os_dpos", problem, memory_limit_bytes, lambda memory: schedule_by_ranks(problem, memory).placement
    )
    cuts = [f"{name} along {dim} into {count}" for name, (dim, count) in cut.items()]
    listed = ", ".join(cuts[:3]) + (f" and {len(cuts) - 3} more" if len(cuts) > 3 else "")
    notes = (f"started from {name}", f"cut on the critical path: {listed or 'nothing'}")
    return ((start, replace(answer, notes=notes)),)


def _start(graph: PricedGraph, limit: float | None) -> tuple[PricedGraph, str]:
    """Return the graph from which cutting starts, and its name for the notes (section 5.2)."""
    batch = graph.data_parallel()
    bytes_in_all = float(units.units_of(graph.problem).bytes.sum())
    if batch and (graph.problem.devices.within(limit) >= bytes_in_all).any():
        count = next(iter(batch.values()))[1]
        return graph.split(batch), f"data parallelism (the batch of {len(batch)} groups cut in {count})"
    return graph, "the model itself"


def _trial(graph: PricedGraph, limit: float | None, counts_transients: bool) -> _Trial | None:
    problem = graph.problem
    memory = units.MemoryBook(units.units_of(problem), problem.devices.within(limit), counts_transients)
    try:
        return _Trial(graph, schedule_by_ranks(problem, memory))
    except units.NoRoomError:
        return None


def _search(
    best: _Trial, limit: float | None, counts_transients: bool
) -> tuple[_Trial, dict[str, GroupSplit]]:
    """Cut critical-path operators once each, longest first, until a cut gains nothing (lines 4 to 14)."""
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


def _longest_first(start: _Trial) -> list[tuple[str, tuple[GroupSplit, ...]]]:
    """Return the possible cuts of critical-path operators, by descending computing time (lines 4, 5)."""
    graph, problem = start.graph, start.graph.problem
    device = start.schedule.placement.device
    found: dict[str, tuple[float, tuple[GroupSplit, ...]]] = {}
    for operator in placed_ranks(problem, device).path:
        name = graph.whole_of(operator)
        if name is not None and name not in found and (splits := graph.split_choices(operator)):
            place = operator, device[operator]
            found[name] = float(problem.forward_s[place] + problem.backward_s[place]), splits
    return [(name, found[name][1]) for name in sorted(found, key=lambda name: -found[name][0])]
