"""Placement programs that time devices as published, and their own answer whatever the simulator says.

These programs (NetSplit's, and (6-2)–(6-7), its extension of Pesto's) let operators share a
device in time, so that they promise what no device does. Nothing here starts from a heuristic or prefers
another placement than the program's best: its answer is simulated, and a faster heuristic is named in the
notes.

Only an answer that does not fit is no answer: the program is solved once more with less room on the devices
that overflowed, as with the methods that sum memory (``common/units.py``).
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
from tensoropt.planners.placed.common.contraction import Contraction
from tensoropt.planners.placed.common.starting import faster_heuristic
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.placed.exact.program import PlacementProgram
from tensoropt.planners.placed.exact.rounds import (
    SolverOutcome,
    effort_of,
    effort_words,
    serial_s,
    solve,
)
from tensoropt.planners.placed.exact.rules import Rules, lasting_units, unit_bytes
from tensoropt.planners.placed.exact.variables import ROUNDING, Grid, lower_bound_s
from tensoropt.types import Floats
from tensoropt.units import format_bytes, format_seconds

_FIRST = 0.5
"""The share of the effort that is left which one run may spend: the others may have to give devices less
room. An assumption."""


@dataclass(frozen=True, kw_only=True)
class PublishedProgram:
    """A published program.

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
    knows_memory: bool
    promise: str
    note: str


def place_as_published(
    problem: PlacementProblem, contraction: Contraction, seed: int, published: PublishedProgram
) -> PlacedAnswer:
    """Return the program's own answer, with notes on what it promises and on what is faster.

    Args:
        contraction: the problem as the program knows it: in blocks, or with groups that share a device.

    Raises:
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: the program finds nothing that fits when simulated.
    """
    cp_sat(published.name)
    run = _Runs(contraction, published).solve(seed)
    return PlacedAnswer(run.simulated.placement, tuple(_notes(problem, seed, published, run)))


@dataclass(frozen=True)
class _Run:
    """An answer: the solver's outcome, the answer as simulated, and the number of runs before it."""

    outcome: SolverOutcome
    simulated: SimulatedPlacement
    before: int


class _Runs:
    """A program, solved with less and less room until its answer fits."""

    def __init__(self, contraction: Contraction, published: PublishedProgram):
        self.contraction, self.published, self.blocks = contraction, published, contraction.problem
        self.capacity = self.blocks.devices.capacity_bytes.astype(float)
        if not published.knows_memory:
            self.capacity = np.full_like(self.capacity, np.inf)
        # Only the size of a tick depends on this: as devices may do several things at once it is no bound.
        backward = self.blocks.backward_s * published.rules.backward
        self.grid = Grid.of(self.blocks, lower_bound_s(replace(self.blocks, backward_s=backward)))
        self.effort = effort_of(published.seconds)
        self.end = time.monotonic() + published.seconds

    def solve(self, seed: int) -> _Run:
        nearest: SimulatedPlacement | None = None
        before = 0
        while True:
            outcome = self._outcome(seed + before)
            if outcome.placement is None:
                raise InfeasibleError(self._refusal(outcome, nearest, before))
            placement = self.contraction.expand(outcome.placement)
            simulated = simulate_placement(self.contraction.whole, placement)
            if simulated.fits():
                return _Run(outcome, simulated, before)
            if nearest is None or _over(simulated).max() < _over(nearest).max():
                nearest = simulated
            if self.effort <= 0 or time.monotonic() >= self.end:
                raise InfeasibleError(self._refusal(outcome, nearest, before))
            self.capacity = self._less_room(simulated, outcome.placement.device)
            before += 1

    def _outcome(self, seed: int) -> SolverOutcome:
        program = PlacementProgram(
            self.blocks, self.published.rules, self.grid, serial_s(self.blocks), self.capacity.tolist()
        )
        outcome = solve(
            program,
            seed=seed,
            effort=_FIRST * self.effort,
            seconds=max(self.end - time.monotonic(), 0.0),
        )
        self.effort -= outcome.effort
        return outcome

    def _less_room(self, simulated: SimulatedPlacement, device: Sequence[int]) -> Floats:
        """Return the capacity of the next run: the devices' own, then less than what the rule counts of this
        answer by what the simulator sees above it; on all devices, as on equal ones the same answer would
        only change places."""
        if np.isinf(self.capacity).any():
            return self.blocks.devices.capacity_bytes.astype(float)
        rules, over = self.published.rules, _over(simulated)
        counted = lasting_units(self.blocks, device, rules) * unit_bytes(self.blocks, rules)
        return np.minimum(self.capacity, max(0.0, float((counted - over)[over > 0].min())))

    def _refusal(self, outcome: SolverOutcome, nearest: SimulatedPlacement | None, before: int) -> str:
        devices = self.blocks.devices
        capacity = format_bytes(devices.in_all(float(devices.capacity_bytes.max())))
        none = ", and its program has none" if math.isinf(outcome.bound_s) and not before else ""
        text = f"{self.published.name} finds no plan within {capacity} on {devices.count} devices{none}"
        if nearest is not None:
            text += f"; the nearest needs {format_bytes(float(_over(nearest).max()))} more on one of them"
        if self.published.note:
            text += f"; {self.published.note}"
        return f"{text}; raise the limit, use more devices or another planner"


def _over(simulated: SimulatedPlacement) -> Floats:
    return np.array(simulated.peak_bytes) - simulated.problem.devices.capacity_bytes


def _notes(problem: PlacementProblem, seed: int, published: PublishedProgram, run: _Run) -> Iterator[str]:
    outcome, took = run.outcome, run.simulated.time_s
    if published.note:
        yield published.note
    yield (
        f"the program says {format_seconds(outcome.time_s)} of its own answer, the simulator "
        f"{format_seconds(took)}: {published.promise}"
    )
    own = max(0.0, 1 - outcome.bound_s / outcome.time_s)
    if own <= ROUNDING:
        yield "its program is solved: nothing is faster by its own rules"
    else:
        yield f"its program's own gap is {own:.2%}"
    if words := effort_words(outcome, published.seconds):
        yield words
    if run.before:
        runs = f"{run.before} more" if run.before > 1 else "once more"
        yield f"its first answer did not fit when simulated; solved {runs}, with less room"
    if heuristic := faster_heuristic(problem, seed, took):
        yield heuristic
