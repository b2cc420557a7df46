"""The rounds of an exact planner: its program, solved until the bound meets the simulator or effort is spent.

The program starts from the best known schedule, and the better placements it finds are simulated. If the
simulator disagrees with a proven optimum, that placement is forbidden (few operators) or the device that
overflowed gets less room, and the program is solved once more while there is effort left.

:class:`KnownPlacements` keeps the best of all placements of a problem that were simulated.

:func:`solve` solves a :class:`~tensoropt.planners.placed.exact.program.PlacementProgram`: hints in,
placements out.

The solver's strategies take turns in a fixed rhythm and are limited in effort instead of seconds, so an
answer depends on the seed alone, whatever the machine; the limit in seconds is a safeguard, and an answer
that it cut short says so.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.placed.common.contraction import Contraction
from tensoropt.planners.placed.common.starting import heuristics, ordered, possible
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.exact.program import PlacementProgram
from tensoropt.planners.placed.exact.rules import Rules, lasting_units, obeys
from tensoropt.planners.placed.exact.variables import ROUNDING, Grid, MessageKey, lower_bound_s


@dataclass(frozen=True)
class KnownPlacement:
    """A simulated placement; ``source`` names the method that found it."""

    source: str
    simulated: SimulatedPlacement

    @property
    def excess_bytes(self) -> float:
        """The bytes by which the most overflowing device exceeds its capacity."""
        over = np.array(self.simulated.peak_bytes) - self.simulated.problem.devices.capacity_bytes
        return float(over.max())


_FASTEST = 3
"""The number of fastest placements that are kept; an assumption."""


@dataclass
class KnownPlacements:
    """Placements of one problem that were simulated, all of one origin.

    Attributes:
        rules: the rules that an answer must obey, beside fitting.
        fastest: the fastest placements that fit and obey the rules, on different devices, ascending in time.
        broken: the fastest placement that fits but breaks the rules.
        nearest: of the placements that do not fit, the one that exceeds a device least.
    """

    problem: PlacementProblem
    rules: Rules = field(default_factory=Rules)
    fastest: tuple[KnownPlacement, ...] = ()
    broken: KnownPlacement | None = None
    nearest: KnownPlacement | None = None

    def consider(self, placement: Placement, source: str) -> SimulatedPlacement:
        """Simulate a placement, keep it if it is among the best, and return its simulated step."""
        candidate = KnownPlacement(source, simulate_placement(self.problem, placement))
        simulated = candidate.simulated
        if not simulated.fits():
            if self.nearest is None or candidate.excess_bytes < self.nearest.excess_bytes:
                self.nearest = candidate
        # A placement that breaks a rule must be neither the answer nor a bound on the program, however fast
        # it is.
        elif obeys(self.problem, placement.device, self.rules):
            self._keep(candidate)
        elif self.broken is None or simulated.time_s < self.broken.simulated.time_s:
            self.broken = candidate
        return simulated

    def _keep(self, candidate: KnownPlacement) -> None:
        kept: dict[tuple[int, ...], KnownPlacement] = {}
        # Stable: what was known first stands before what is only as fast.
        for known in sorted((*self.fastest, candidate), key=lambda known: known.simulated.time_s):
            kept.setdefault(known.simulated.placement.device, known)
        self.fastest = tuple(kept.values())[:_FASTEST]

    @property
    def best(self) -> KnownPlacement | None:
        """The fastest placement that fits and obeys the rules."""
        return self.fastest[0] if self.fastest else None

    @property
    def best_s(self) -> float:
        """The seconds of the best placement; inf while there is none."""
        return self.best.simulated.time_s if self.best is not None else float("inf")


EFFORT_PER_SECOND = 0.3
"""Effort granted per second of the time limit. One otherwise idle core spends a little more than that, so
that the limit on effort is usually reached first."""


def effort_of(seconds: float) -> float:
    """Return the solver's effort for a time limit, in the solver's units."""
    return seconds * EFFORT_PER_SECOND


STRATEGIES = 8
"""The solver's strategies, run in parallel if there are cores for them. A single one often ends without a
proof: with tight memory it spent more effort on five operators than all eight strategies need together."""

_WATCH_S = 0.2
"""The seconds between checks for an interrupt while the solver runs."""

_CLOCK = 0.95
"""The share of its seconds from which a run counts as ended by the clock, as the solver stops a little
early.
"""


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
    on_placement: Callable[[Placement], None] = lambda placement: None,
) -> SolverOutcome:
    """Solve a program within its limits.

    Args:
        hint: a schedule to start from.
        on_placement: called from the solver's thread with each placement better than all before it.
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
            on_placement(program.decode(self.value))

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
        clock=status in (cp.FEASIBLE, cp.UNKNOWN) and solver.wall_time >= _CLOCK * seconds,
    )


def effort_words(outcome: SolverOutcome, seconds: float) -> str:
    """Return what ended a run of the solver before its proof; "" if it was proven."""
    if outcome.proven:
        return ""
    ended = (
        f"ended by the clock after {seconds:g} s: another machine may answer differently"
        if outcome.clock
        else f"ended by its limit of effort, {effort_of(seconds):g} units"
    )
    return f"solver {ended}; times rounded down by less than {ROUNDING:.1%}"


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
            thread.join(_WATCH_S)
    except BaseException:
        while thread.is_alive():
            # Repeatedly, as OR-tools ignores a stop that comes before its search has begun.
            solver.stop_search()
            thread.join(_WATCH_S)
        raise
    if failure:
        raise failure[0]
    return result[0]


def _schedule_of(program: PlacementProgram, simulated: SimulatedPlacement) -> list[tuple[Any, int]]:
    """Return a simulated schedule as values of all the program's variables, rounded down as its durations
    are."""
    values: dict[int, tuple[Any, int]] = {}

    def put(variable: Any, value: int) -> None:
        values[variable.index] = (variable, int(value))

    def lookup(variable: Any) -> int:
        """Return a variable's value, also for a literal's negation, whose index is negative."""
        index = variable.index
        return values[index][1] if index >= 0 else 1 - values[-index - 1][1]

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
        if variable.index not in values:
            put(variable, recipe(lookup))
    return list(values.values())


class _TimedTask(NamedTuple):
    """A task of a known schedule: the program's variables of its start and end, and their values in ticks."""

    start: Any
    end: Any
    begins: int
    ticks: int


def _operators(program: PlacementProgram, simulated: SimulatedPlacement) -> Iterator[_TimedTask]:
    problem, place = program.problem, simulated.placement
    phases = [(False, "forward", place.forward, problem.forward_s)]
    if program.backward:
        phases.append((True, "backward", place.backward_orders, problem.backward_s))
    for back, phase, orders, seconds in phases:
        events = [e for e in simulated.timeline.events if e.task.phase == phase]
        operators = [o for order in orders for o in order]
        for o, event in zip(operators, events, strict=True):
            took = program.grid.ticks(seconds[o, place.device[o]])
            begins = program.grid.ticks(event.start_s)
            yield _TimedTask(program.start[back][o], program.end[back][o], begins, took)


def _messages(program: PlacementProgram, simulated: SimulatedPlacement) -> Iterator[_TimedTask]:
    timeline, problem = simulated.timeline, program.problem
    events = (timeline.events[i] for i in timeline.order)
    sends = [event for event in events if event.task.phase.startswith("send")]
    for (number, source, target, back), event in zip(simulated.transfers, sends, strict=True):
        start, end = program.message[MessageKey(number, source if back else target, back)]
        took = problem.devices.transfer_s(problem.tensors[number].bytes, source, target)
        yield _TimedTask(start, end, program.grid.ticks(event.start_s), program.grid.ticks(took))


@dataclass(frozen=True, kw_only=True)
class ExactSettings:
    """Settings of an exact planner.

    Attributes:
        name: the planner's name.
        rules: the rules of its program.
        most_blocks: a graph with more operators is contracted to so many blocks.
        seconds: the solver's time, to which the limit on its effort is proportional.
        search_s: the time of a neighbourhood search from the program's answer and the heuristics'
            (:mod:`.neighbourhood`), if the answer is not proven optimal; 0 for none.
        most_after_all: refuse if more blocks remain because no more can be joined; None never refuses.
    """

    name: str
    rules: Rules
    most_blocks: int
    seconds: float
    search_s: float = 0.0
    most_after_all: int | None = None


_MOST_CUTS = 3
"""The most ways tried to cut a problem in two, the most even ones; an assumption."""


def starts(problem: PlacementProblem, rules: Rules, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield the starting points of an exact planner: the heuristics' placements, and some made to obey a
    balance."""
    yield from heuristics(problem, seed)
    if rules.balance is not None and problem.devices.count == 2:
        yield from _halves(problem, rules, seed)


def _halves(problem: PlacementProblem, rules: Rules, seed: int) -> Iterator[tuple[str, Placement]]:
    """Yield placements with the first operators on device 0 and the others on device 1, in the most even ways
    that obey the rules.

    The heuristics know nothing of a balance, so possibly none of their placements obeys it.
    """
    units = units_of(problem)
    cuts = []
    for first in range(1, len(units.members)):
        device = tuple(int(unit >= first) for unit in units.of)
        if possible(problem, Placement.in_order(device, 2)) and obeys(problem, device, rules):
            cuts.append((int(lasting_units(problem, device, rules).max()), device))
    for _, device in sorted(cuts)[:_MOST_CUTS]:
        for source, placement in ordered(problem, device, seed):
            yield f"two halves, ordered by {source}", placement


_CUT_BLOCKS = 12
"""The number of blocks up to which a placement that is slower when simulated than in the program is forbidden
as a whole. An assumption: with more blocks there are so many placements that forbidding one gains little.
"""

ROUNDS = 200
"""The most rounds, each with a run of the solver; an assumption. Effort or time usually end them first."""

_SIMULATED_PER_RUN = 8
"""The number of placements of one run of the solver that are simulated, the last and best first; an
assumption, as simulating takes time too.
"""


@dataclass(frozen=True)
class Proof:
    """The knowledge after the last round.

    Attributes:
        bound_s: seconds that no placement of the program's blocks beats, by its rules; inf if none fits.
        last: the last run of the solver; None if the warm start met the bound before any run.
        own: the program's own best as simulated, fitting or not.
    """

    bound_s: float
    last: SolverOutcome | None = None
    own: SimulatedPlacement | None = None


class Rounds:
    """The program, solved until its bound meets the simulator or its effort is spent."""

    def __init__(
        self,
        settings: ExactSettings,
        contraction: Contraction,
        known: KnownPlacements,
        heuristics: KnownPlacements,
        seed: int,
    ):
        self.settings, self.contraction, self.known, self.seed = settings, contraction, known, seed
        self.blocks = contraction.problem
        self.whole = self.blocks is contraction.whole
        self.longest_s = self.blocks.micro_batches * serial_s(self.blocks)
        self.hint = self._hint(heuristics.best)
        self.floor_s = lower_bound_s(self.blocks)
        self.capacity = self.blocks.devices.capacity_bytes.astype(float)
        # Memory over time takes intervals for every tensor on every device: it is followed only where memory
        # is known to be tight. With several micro-batches the program knows only one, and not the memory of
        # the others beside it.
        self.follows = self.blocks.micro_batches == 1
        self.rules = replace(settings.rules, lifetimes=self.follows and self._tight())
        self.effort = effort_of(settings.seconds)
        self.end = time.monotonic() + settings.seconds
        self.tightened = self.cut = False

    def solve(self) -> Proof:
        """Return the knowledge after the last round; placements go to ``known`` as they are found."""
        proof = Proof(self.floor_s)
        # The warm start is proven already, up to the rounding of ticks.
        if self.known.best_s * (1 - ROUNDING) <= self.floor_s:
            return proof
        program = self._program()
        for number in range(ROUNDS):
            placements: list[Placement] = []
            outcome = solve(
                program,
                # The rounds differ from one another, but each is the same for the same seed.
                seed=self.seed + number,
                effort=self.effort if self._is_last_round() else self.effort / 2,
                seconds=max(self.end - time.monotonic(), 0.0),
                # Once something is forbidden the hint may be no solution, and OR-tools 9.15 ends the process
                # where it is given one and then finds that there is none ("heuristics.fixed_search").
                hint=None if self.cut or self.tightened else self.hint,
                on_placement=placements.append,
            )
            self.effort -= outcome.effort
            own = self._simulate_found(placements) or proof.own
            proof = Proof(self._bound(proof, outcome), outcome, own)
            if not self._disagrees(proof):
                break
            program = self._next(program, proof)
        self._reorder(proof)
        return proof

    def _program(self) -> PlacementProgram:
        grid = Grid.of(self.blocks, self.floor_s)
        return PlacementProgram(self.blocks, self.rules, grid, self.longest_s, self.capacity.tolist())

    def _tight(self) -> bool:
        """Return whether memory is known to exclude something faster than the best."""
        nearest = self.known.nearest
        return nearest is not None and nearest.simulated.time_s < self.known.best_s

    def _is_last_round(self) -> bool:
        """Return whether no other round is planned: the first leaves half the effort to one that knows
        lifetimes."""
        return self.rules.lifetimes or not self.follows or bool(np.isinf(self.capacity).all())

    def _next(self, program: PlacementProgram, proof: Proof) -> PlacementProgram:
        """Return the program of the next round, given a placement about which the simulator disagrees."""
        own, outcome = proof.own, proof.last
        assert own is not None
        assert outcome is not None
        if not own.fits() and not self._is_last_round():
            self.rules = replace(self.rules, lifetimes=True)
            return self._program()
        if self.cuts:
            assert outcome.placement is not None
            self.cut = True
            program.forbid(outcome.placement)
            if self.known.best is not None:
                program.demand(less_than_s=self.known.best_s)
            return program
        # If placements are not forbidden one by one, what overflowed is taken off the room instead.
        over = np.array(own.peak_bytes) - self.blocks.devices.capacity_bytes
        self.capacity, self.tightened = self.capacity - np.maximum(over, 0.0), True
        return self._program()

    def _disagrees(self, proof: Proof) -> bool:
        """Return whether the simulator disagrees with the program, and another round can resolve it."""
        outcome, own = proof.last, proof.own
        if outcome is None or own is None or outcome.placement is None:
            return False
        if self.effort <= 0 or time.monotonic() >= self.end:
            return False
        if not own.fits() and not self._is_last_round():
            return True
        proven = proof.bound_s >= self.known.best_s * (1 - ROUNDING)
        return outcome.proven and not proven and (self.cuts or not own.fits())

    @property
    def cuts(self) -> bool:
        """Whether a placement that is slower than the program takes it to be may be forbidden."""
        return self.blocks.size <= _CUT_BLOCKS

    def _bound(self, proof: Proof, outcome: SolverOutcome) -> float:
        """Return the bound after a round: forbidden placements have been simulated, so the best of them
        bounds as well; less room does not."""
        # With less room than there is the program may exclude placements that fit, so that its bounds prove
        # nothing.
        if self.tightened:
            return proof.bound_s
        # Before any is forbidden, the best known placement is still a solution, and bounds nothing.
        simulated_s = self.known.best_s if self.cut else math.inf
        return max(proof.bound_s, min(outcome.bound_s, simulated_s))

    def _hint(self, best: KnownPlacement | None) -> SimulatedPlacement | None:
        """Return the best known schedule that obeys the rules, for one micro-batch as in the program; the
        placements over blocks, which the program starts from, are simulated in whole.

        Args:
            best: the heuristics' best placement of the whole graph.
        """
        rules = self.settings.rules
        simulated_ones = []
        for source, placement in starts(self.blocks, rules, self.seed):
            simulated_ones.append(simulate_placement(self.blocks, placement))
            name = source if self.whole else f"{source} over blocks"
            self.known.consider(self.contraction.expand(placement), name)
        if best is not None and not self.whole:
            # The best placement may cut through blocks: each goes where most of its work lay.
            device = self.contraction.majority(best.simulated.placement.device)
            simulated_ones += [
                simulate_placement(self.blocks, p) for _, p in ordered(self.blocks, device, self.seed)
            ]
        allowed = (
            simulated
            for simulated in simulated_ones
            if simulated.fits() and obeys(self.blocks, simulated.placement.device, rules)
        )
        best_of_blocks = min(allowed, key=lambda simulated: simulated.time_s, default=None)
        if best_of_blocks is None:
            return None
        single = replace(self.blocks, micro_batches=1)
        hint = simulate_placement(single, best_of_blocks.placement)
        self.longest_s = max(best_of_blocks.time_s, hint.time_s)
        return hint

    def _simulate_found(self, placements: list[Placement]) -> SimulatedPlacement | None:
        """Return the simulated step of the program's last and best placement; some of those before it are
        simulated as well.
        """
        own: SimulatedPlacement | None = None
        for number, placement in enumerate(reversed(placements)):
            if number >= _SIMULATED_PER_RUN and self.known.best is not None:
                break
            simulated = self.known.consider(self.contraction.expand(placement), "the program")
            own = own or simulated
        return own

    def _reorder(self, proof: Proof) -> None:
        """Reorder the single operators, instead of blocks, on the program's devices."""
        if proof.own is not None and not self.whole:
            whole = self.contraction.whole
            for source, placement in ordered(whole, proof.own.placement.device, self.seed):
                self.known.consider(placement, f"the program, ordered by {source}")


def serial_s(problem: PlacementProblem) -> float:
    """Return an upper bound on any sensible schedule: the seconds of everything one after another, and of
    every message on top.
    """
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum()
    devices = problem.devices
    slowest = sum(devices.latency_s.max() + t.bytes * devices.seconds_per_byte.max() for t in problem.tensors)
    return float(work + 2 * devices.count * slowest)
