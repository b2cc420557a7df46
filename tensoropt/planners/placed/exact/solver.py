"""Solve a placement program by CP-SAT, limited in effort so that the result depends on the seed alone.

A second limit, in seconds, is a safeguard; if it ended the run, a note says so.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from tensoropt.placement import Placement, SimulatedPlacement
from tensoropt.planners.placed.exact.program import ROUNDING, PlacementProgram

_EFFORT_PER_SECOND = 0.3
"""The effort granted per second of the time limit. One otherwise idle core spends a little more than that, so
that the limit on effort is usually reached first."""

_STRATEGIES = 8
"""The number of the solver's strategies, run in parallel if there are cores for them. A single one often ends
without a proof: with tight memory it spent more effort on five operators than all eight need together."""

_WATCH_S = 0.2
"""The time between checks for an interrupt while the solver runs, in seconds."""

_CLOCK = 0.95
"""The share of its time limit from which on a run counts as ended by it, as the solver stops early."""


def effort_of(seconds: float) -> float:
    """Convert a time limit in seconds to a limit of effort, in CP-SAT's deterministic time."""
    return seconds * _EFFORT_PER_SECOND


@dataclass(frozen=True)
class SolverOutcome:
    """The result of a solver run.

    Attributes:
        bound_s: the proven lower bound on the program's solutions in seconds; inf if there is no solution.
        placement: the best placement found; None if there was none.
        time_s: the placement's step time in the program in seconds; inf without a placement.
        proven: whether it is proven that no better placement exists.
        effort: the effort spent, in CP-SAT's deterministic time.
        clock: whether the limit in seconds ended the run, rather than the limit on effort.
    """

    bound_s: float
    placement: Placement | None
    time_s: float
    proven: bool
    effort: float
    clock: bool

    def ended(self, seconds: float) -> str:
        """Return a note on the limit that ended a run of at most ``seconds``; "" if its result is proven."""
        if self.proven:
            return ""
        ended = (
            f"ended by the clock after {seconds:g} s: another machine may answer differently"
            if self.clock
            else f"ended by its limit of effort, {effort_of(seconds):g} units of CP-SAT's deterministic time"
        )
        return f"solver {ended}; times rounded down by less than {ROUNDING:.1%}"


def solve(
    program: PlacementProgram,
    *,
    seed: int,
    effort: float,
    seconds: float,
    hint: SimulatedPlacement | None = None,
) -> SolverOutcome:
    """Solve a program within limits on effort and seconds.

    Args:
        hint: a simulated placement from which the solver starts.
    """
    cp = program.cp
    if hint is not None:
        _add_hint(program, hint)
    solver = cp.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = _STRATEGIES
    # Without interleaving, workers share solutions at arbitrary times, and one seed gives several answers.
    parameters.interleave_search = True
    parameters.random_seed = seed % 2**31
    parameters.max_deterministic_time = effort
    parameters.max_time_in_seconds = seconds
    parameters.catch_sigint_signal = False  # an interrupt is ours to handle, see _stoppable
    status = _stoppable(solver, program.model)
    solved = status in (cp.OPTIMAL, cp.FEASIBLE)
    bound = float("inf") if status == cp.INFEASIBLE else solver.best_objective_bound * program.grid.tick_s
    return SolverOutcome(
        bound_s=bound,
        placement=program.decode(solver.value) if solved else None,
        time_s=solver.objective_value * program.grid.tick_s if solved else float("inf"),
        proven=status in (cp.OPTIMAL, cp.INFEASIBLE),
        effort=float(solver.response_proto.deterministic_time),
        clock=status in (cp.FEASIBLE, cp.UNKNOWN) and solver.wall_time >= _CLOCK * seconds,
    )


def _stoppable(solver: Any, model: Any) -> Any:
    """Run ``solver.solve`` in a thread, so that an interrupt (such as Ctrl-C) stops solver and thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="solver") as pool:
        run = pool.submit(solver.solve, model)
        try:
            while not run.done():
                wait([run], _WATCH_S)
        except BaseException:
            while not run.done():
                # Repeatedly, as OR-tools ignores a stop that comes before its search has begun.
                solver.stop_search()
                wait([run], _WATCH_S)
            raise
        return run.result()


def _add_hint(program: PlacementProgram, simulated: SimulatedPlacement) -> None:
    problem, place = program.problem, simulated.placement
    # One literal stands for all operators of a unit, and is hinted once.
    literals = {id(row): (row, d) for row, d in zip(program.on, place.device, strict=True)}
    for row, device in literals.values():
        for d, literal in enumerate(row):
            program.model.add_hint(literal, d == device)
    for back, orders in ((False, place.forward), (True, place.backward)):
        if back not in program.start:
            continue
        seconds = problem.backward_s if back else problem.forward_s
        for o in (o for order in orders for o in order):
            begins = program.grid.ticks(float(simulated.operator_starts[int(back)][o]))
            program.model.add_hint(program.start[back][o], begins)
            took = program.grid.ticks(seconds[o, place.device[o]])
            program.model.add_hint(program.end[back][o], begins + took)
