"""Solving a :class:`~tensoropt.planners.placed.exact.program.PlacementProgram`: hints in, placements out.

The solver's strategies take turns in a fixed rhythm and are limited in effort instead of seconds, so an
answer depends on the seed alone, whatever the machine; the limit in seconds is a safeguard, and an answer
that it cut short says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensoropt.placement import Placement, SimulatedPlacement
from tensoropt.planners.placed.exact.program import PlacementProgram
from tensoropt.planners.placed.exact.variables import MessageKey

EFFORT_PER_SECOND = 0.3
"""Effort granted per second of the time limit. One otherwise idle core spends a little more than that, so
that the limit on effort is usually reached first."""

STRATEGIES = 8
"""The solver's strategies, run in parallel if there are cores for them. A single one often ends without a
proof: with tight memory it spent more effort on five operators than all eight strategies need together."""

WATCH_S = 0.2
"""The seconds between checks for an interrupt while the solver runs."""

CLOCK = 0.95
"""A run that used this share of its seconds counts as ended by the clock, as the solver stops a little
early."""


@dataclass(frozen=True)
class SolverOutcome:
    """The result of a solver run.

    Attributes:
        bound_s: the proven bound in seconds: no solution of the program is shorter; inf if there is none at
            all.
        placement: the best placement found; None if there was none.
        time_s: the program's own time for it; inf without one.
        proven: whether nothing better exists.
        effort: the effort spent, in the solver's reproducible unit.
        clock: whether the limit in seconds ended the run, rather than the limit on effort.
    """

    bound_s: float
    placement: Placement | None
    time_s: float
    proven: bool
    effort: float
    clock: bool


def solve(
    program: PlacementProgram,
    *,
    seed: int,
    effort: float,
    seconds: float,
    hint: SimulatedPlacement | None = None,
    found: Callable[[Placement], None] = lambda placement: None,
) -> SolverOutcome:
    """Solve a program within its limits.

    Args:
        hint: a schedule to start from.
        found: called with every placement that is better than the previous ones, from the solver's thread.
    """
    cp = program.cp
    program.model.clear_hints()
    if hint is not None:
        for variable, value in _schedule_of(program, hint):
            program.model.add_hint(variable, value)
    solver = cp.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = STRATEGIES
    # Without taking turns, workers share what they find whenever they find it, and one seed gives several
    # answers.
    parameters.interleave_search = True
    parameters.random_seed = seed % 2**31
    parameters.max_deterministic_time = effort
    parameters.max_time_in_seconds = seconds
    parameters.catch_sigint_signal = False  # an interrupt is ours to handle, see _stoppable

    class Watcher(cp.CpSolverSolutionCallback):  # type: ignore[name-defined, misc, unused-ignore]
        def on_solution_callback(self) -> None:
            found(program.decode(self.value))

    status = _stoppable(solver, program.model, Watcher())
    solved = status in (cp.OPTIMAL, cp.FEASIBLE)
    response = solver.response_proto
    bound = float("inf") if status == cp.INFEASIBLE else solver.best_objective_bound * program.grid.tick_s
    return SolverOutcome(
        bound_s=bound,
        placement=program.decode(solver.value) if solved else None,
        time_s=solver.objective_value * program.grid.tick_s if solved else float("inf"),
        proven=status in (cp.OPTIMAL, cp.INFEASIBLE),
        effort=float(response.deterministic_time),
        clock=status in (cp.FEASIBLE, cp.UNKNOWN) and solver.wall_time >= CLOCK * seconds,
    )


def _stoppable(solver: Any, model: Any, watcher: Any) -> Any:
    """Run ``solver.solve`` in a thread, so that an interrupt stops the search and leaves nothing behind."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(solver.solve(model, watcher))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="solver", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(WATCH_S)
    except BaseException:
        while thread.is_alive():
            # Repeatedly, as OR-tools ignores a stop that comes before its search has begun.
            solver.stop_search()
            thread.join(WATCH_S)
        raise
    if failure:
        raise failure[0]
    return result[0]


def _schedule_of(program: PlacementProgram, simulated: SimulatedPlacement) -> list[tuple[Any, int]]:
    """Return a simulated schedule as values of all the program's variables, rounded down as its durations
    are."""
    known: dict[int, tuple[Any, int]] = {}

    def put(variable: Any, value: int) -> None:
        known[variable.index] = (variable, int(value))

    def lookup(variable: Any) -> int:
        """Return a variable's value, also for a literal's negation, whose index is negative."""
        index = variable.index
        return known[index][1] if index >= 0 else 1 - known[-index - 1][1]

    for literals, device in zip(program.on, simulated.placement.device, strict=True):
        for d, literal in enumerate(literals):
            put(literal, d == device)
    for start, end, begins, ticks in (*_operators(program, simulated), *_messages(program, simulated)):
        put(start, begins)
        put(end, begins + ticks)
    put(program.zero, 0)
    put(program.horizon, program.most)
    # Recipes read only what was derived before them, so that one pass in their order completes the hint.
    for variable, recipe in program.recipes:
        if variable.index not in known:
            put(variable, recipe(lookup))
    return list(known.values())


class TimedTask(NamedTuple):
    """A task of a known schedule: the program's variables of its start and end, and their values in ticks."""

    start: Any
    end: Any
    begins: int
    ticks: int


def _operators(program: PlacementProgram, simulated: SimulatedPlacement) -> Iterator[TimedTask]:
    problem, place = program.problem, simulated.placement
    phases = [(False, "forward", place.forward, problem.forward_s)]
    if problem.training:
        phases.append((True, "backward", place.backward_orders, problem.backward_s))
    for back, phase, orders, seconds in phases:
        events = [e for e in simulated.timeline.events if e.task.phase == phase]
        operators = [o for order in orders for o in order]
        for o, event in zip(operators, events, strict=True):
            took = program.grid.ticks(seconds[o, place.device[o]])
            begins = program.grid.ticks(event.start_s)
            yield TimedTask(program.start[back][o], program.end[back][o], begins, took)


def _messages(program: PlacementProgram, simulated: SimulatedPlacement) -> Iterator[TimedTask]:
    timeline, problem = simulated.timeline, program.problem
    events = (timeline.events[i] for i in timeline.order)
    sends = [event for event in events if event.task.phase.startswith("send")]
    for (number, source, target, back), event in zip(simulated.transfers, sends, strict=True):
        start, end = program.message[MessageKey(number, source if back else target, back)]
        took = problem.devices.transfer_s(problem.tensors[number].bytes, source, target)
        yield TimedTask(start, end, program.grid.ticks(event.start_s), program.grid.ticks(took))
