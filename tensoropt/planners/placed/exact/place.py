"""The procedure that the exact planners share: a program, solved until its answer fits when simulated.

Where a program's answer does not fit, it is solved once more with less room on the devices, as with the
methods that sum memory (``common/units.py``). A program in which a device does one thing at a time starts
from the best heuristic's placement of its blocks, and the faster of the two is the answer. Programs as
published answer with what they find, whatever is faster; the notes name a faster heuristic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.compare import cp_sat
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.planners.placed.common.contraction import Contraction, GroupLimits, co_place, contract
from tensoropt.planners.placed.common.starting import faster_heuristic, heuristics
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.placed.exact.program import ROUNDING, Grid, PlacementProgram
from tensoropt.planners.placed.exact.rules import (
    Rules,
    lasting_units,
    obeys,
    unit_bytes,
)
from tensoropt.planners.placed.exact.solver import SolverOutcome, effort_of, solve
from tensoropt.types import Floats
from tensoropt.units import format_bytes, format_seconds

_FIRST = 0.5
"""The share of the effort that is left which one run may spend: the others may have to give devices less
room. An assumption."""
SHARE = 0.25
"""The share of a planner's seconds for a step of several micro-batches: usually several counts are tried, and
together they should not take several times as long. An assumption."""


@dataclass(frozen=True, kw_only=True)
class ExactProgram:
    """A planner's program.

    Attributes:
        name: the planner's name.
        rules: the rules of its program.
        seconds: the solver's time, to which the limit on its effort is proportional.
        knows_memory: whether it limits the memory of devices from the start.
        promise: the reason why its own time for its answer is shorter than the simulated one.
        note: what was grouped or contracted; "" for nothing.
    """

    name: str
    rules: Rules
    seconds: float
    knows_memory: bool = True
    promise: str = "messages queue in another order there, and blocks run in one go"
    note: str = ""


@dataclass(frozen=True)
class ExactAnswer:
    """The answer of a program.

    Attributes:
        bound_s: seconds that are proven: no placement that obeys the rules is faster.
    """

    simulated: SimulatedPlacement
    bound_s: float
    notes: tuple[str, ...]

    @property
    def proven(self) -> bool:
        """Whether nothing is faster, up to rounding."""
        return self.simulated.time_s * (1 - ROUNDING) <= self.bound_s

    @property
    def placed(self) -> PlacedAnswer:
        """The placement, with the notes on it."""
        return PlacedAnswer(self.simulated.placement, self.notes)


def contracted(problem: PlacementProblem, most_blocks: int) -> Contraction:
    """Return the problem in at most ``most_blocks`` blocks, with one operator per block if that is possible.

    Co-placement's limits leave the program a choice: no block of more than a quarter of a device's share of
    operators, work and memory. If they leave too many blocks, they are doubled until they do not.
    """
    if problem.size <= most_blocks:
        return contract(problem, [[o] for o in range(problem.size)])
    # A quarter of a device's share is an assumption: larger blocks leave less to decide, smaller ones leave
    # too many of them.
    share = 1 / (4 * problem.devices.count)
    while True:
        contraction = co_place(problem, GroupLimits.of_shares(problem, share, most_blocks))
        if len(contraction.groups) <= most_blocks or share >= 1:
            return contraction
        share *= 2


def place_exactly(
    problem: PlacementProblem, contraction: Contraction, seed: int, program: ExactProgram
) -> ExactAnswer:
    """Return the program's answer, with notes on what it promises, what is proven, and what is faster.

    Args:
        contraction: the problem as the program knows it: in blocks, or with groups that share a device.

    Raises:
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: nothing found fits when simulated and obeys the rules.
    """
    cp_sat(program.name)
    if problem.micro_batches > 1:
        program = replace(program, seconds=SHARE * program.seconds)
    runs = _Runs(contraction, program)
    start = runs.start(seed) if program.rules.exclusive else None
    found = runs.solve(seed, start)
    begun = (
        None if start is None else simulate_placement(contraction.whole, contraction.expand(start.placement))
    )
    fitting = [each for each in (found, begun) if each is not None and each.fits()]
    if not fitting:
        raise InfeasibleError(runs.refusal())
    best = min(fitting, key=lambda each: each.time_s)
    bound_s = lower_bound_s(problem)
    # What a program proves with all room, over operators and not blocks, holds for every placement.
    if program.rules.exclusive and runs.blocks is problem:
        bound_s = max(bound_s, min(runs.outcomes[0].bound_s, best.time_s))
    notes = [*_notes(runs, found, best), _proven(program.rules, bound_s, best.time_s)]
    if heuristic := faster_heuristic(problem, seed, best.time_s):
        notes.append(heuristic)
    return ExactAnswer(best, bound_s, tuple(notes))


class _Runs:
    """A program, solved with less and less room until its answer fits.

    Attributes:
        outcomes: the outcome of each run.
        nearest: of the answers that do not fit, the one that exceeds a device least.
    """

    def __init__(self, contraction: Contraction, program: ExactProgram):
        self.contraction, self.program, self.blocks = contraction, program, contraction.problem
        self.capacity = self.blocks.devices.capacity_bytes.astype(float)
        if not program.knows_memory:
            self.capacity = np.full_like(self.capacity, np.inf)
        # Only the size of a tick depends on this: as devices may do several things at once it is no bound.
        backward = self.blocks.backward_s * program.rules.backward
        self.grid = Grid.of(self.blocks, lower_bound_s(replace(self.blocks, backward_s=backward)))
        self.effort = effort_of(program.seconds)
        self.end = time.monotonic() + program.seconds
        self.outcomes: list[SolverOutcome] = []
        self.nearest: SimulatedPlacement | None = None

    def start(self, seed: int) -> SimulatedPlacement | None:
        rules, blocks = self.program.rules, self.blocks
        placements = [placement for _, placement in heuristics(blocks, seed)]
        simulated = (simulate_placement(blocks, p) for p in placements if obeys(blocks, p.device, rules))
        return min((s for s in simulated if s.fits()), key=lambda s: s.time_s, default=None)

    def solve(self, seed: int, start: SimulatedPlacement | None) -> SimulatedPlacement | None:
        most_s, hint = self.blocks.micro_batches * _serial_s(self.blocks), None
        if start is not None:
            hint = simulate_placement(replace(self.blocks, micro_batches=1), start.placement)
            most_s = max(start.time_s, hint.time_s)
        while True:
            outcome = self._outcome(seed, most_s, hint)
            if outcome.placement is None:
                return None
            placement = self.contraction.expand(outcome.placement)
            simulated = simulate_placement(self.contraction.whole, placement)
            if simulated.fits():
                return simulated
            if self.nearest is None or _over(simulated).max() < _over(self.nearest).max():
                self.nearest = simulated
            if self.effort <= 0 or time.monotonic() >= self.end:
                return None
            self.capacity = self._less_room(simulated, outcome.placement.device)
            # With less room the hint may be no solution, and OR-tools 9.15 ends the process where it is given
            # one and then finds that there is none ("heuristics.fixed_search").
            hint = None

    def _outcome(self, seed: int, most_s: float, hint: SimulatedPlacement | None) -> SolverOutcome:
        outcome = solve(
            PlacementProgram(self.blocks, self.program.rules, self.grid, most_s, self.capacity.tolist()),
            seed=seed + len(self.outcomes),
            effort=_FIRST * self.effort,
            seconds=max(self.end - time.monotonic(), 0.0),
            hint=hint,
        )
        self.effort -= outcome.effort
        self.outcomes.append(outcome)
        return outcome

    def _less_room(self, simulated: SimulatedPlacement, device: Sequence[int]) -> Floats:
        """Return the capacity of the next run: the devices' own, then less than what the rule counts of this
        answer by what the simulator sees above it; on all devices, as on equal ones the same answer would
        only change places."""
        if np.isinf(self.capacity).any():
            return self.blocks.devices.capacity_bytes.astype(float)
        over = _over(simulated)
        counted = lasting_units(self.blocks, device) * unit_bytes(self.blocks)
        return np.minimum(self.capacity, max(0.0, float((counted - over)[over > 0].min())))

    def refusal(self) -> str:
        devices, rules = self.blocks.devices, self.program.rules
        most = devices.in_all(float(devices.capacity_bytes.max()))
        none = ", and its program has none" if math.isinf(self.outcomes[0].bound_s) else ""
        within = f" within {format_bytes(most)} on {devices.count} devices" if math.isfinite(most) else ""
        text = f"{self.program.name} finds no plan{within}{_ruled(rules)}{none}"
        if self.nearest is not None:
            text += (
                f"; the nearest needs {format_bytes(float(_over(self.nearest).max()))} more on one of them"
            )
        if self.program.note:
            text += f"; {self.program.note}"
        if rules.balance is not None:
            return f"{text}; raise the limit, or use netsplit or dpos, which have no such rule"
        return f"{text}; raise the limit, use more devices or another planner"


def _over(simulated: SimulatedPlacement) -> Floats:
    return np.array(simulated.peak_bytes) - simulated.problem.devices.capacity_bytes


def _notes(runs: _Runs, found: SimulatedPlacement | None, best: SimulatedPlacement) -> Iterator[str]:
    program, outcome, took = runs.program, runs.outcomes[-1], best.time_s
    if program.note:
        yield program.note
    if found is not None:
        yield (
            f"the program says {format_seconds(outcome.time_s)} of its own answer, the simulator "
            f"{format_seconds(found.time_s)}: {program.promise}"
        )
        own = max(0.0, 1 - outcome.bound_s / outcome.time_s)
        if own <= ROUNDING:
            yield "its program is solved: nothing is faster by its own rules"
        else:
            yield f"its program's own gap is {own:.2%}"
    if best is not found:
        yield f"the warm start stands: the heuristic's {format_seconds(took)} over its blocks"
    if words := outcome.ended(program.seconds):
        yield words
    if before := len(runs.outcomes) - 1:
        times = f"{before} more" if before > 1 else "once more"
        yield f"its first answer did not fit when simulated; solved {times}, with less room"


def _proven(rules: Rules, bound_s: float, took_s: float) -> str:
    gap = max(0.0, 1 - bound_s / took_s)
    percent = f"{gap:.2%} proven" if gap > ROUNDING else "0.00% proven, up to rounding"
    return f"gap {percent}: nothing{_ruled(rules)} is faster than {format_seconds(bound_s)}"


def _ruled(rules: Rules) -> str:
    if rules.balance is None or rules.balance >= 1:
        return ""
    return f" with at most {rules.balance:.0%} of what is stored and kept on one device"


def _serial_s(problem: PlacementProblem) -> float:
    """Return an upper bound on any sensible schedule: the seconds of everything one after another, and of
    every message on top.
    """
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum()
    devices = problem.devices
    slowest = sum(devices.latency_s.max() + t.bytes * devices.seconds_per_byte.max() for t in problem.tensors)
    return float(work + 2 * devices.count * slowest)
