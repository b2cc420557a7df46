"""Solve an integer program for a placement until the solution fits when simulated.

If a solution does not fit, the program is solved again with lower capacities, as in the methods that
sum memory (:mod:`tensoropt.planners.placed.common.units`). If a device runs one operator at a time in the
program, the solver starts from the placement of the best heuristic, and the faster of this placement and the
solution is returned. Other programs return their own solution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.compare import cp_sat
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.planners.placed.common.contraction import (
    Contraction,
    GroupLimits,
    co_place,
    contract,
    share_devices,
)
from tensoropt.planners.placed.common.starting import heuristics, possible
from tensoropt.planners.placed.common.units import PlacedAnswer, limited, units_of
from tensoropt.planners.placed.exact.program import ROUNDING, Grid, PlacementProgram
from tensoropt.planners.placed.exact.rules import Rules, lasting_units, obeys, unit_bytes
from tensoropt.planners.placed.exact.solver import SolverOutcome, effort_of, solve
from tensoropt.types import Floats
from tensoropt.units import format_bytes, format_seconds

_FIRST = 0.5
"""The share of the remaining effort that one run may spend; the rest is for runs with less room. An
assumption."""
_GROUPS_PER_DEVICE = 2
"""The factor in NetSplit's limit of 2n groups. n is read as the number of devices; twice the number of
operators would be no limit."""


@dataclass(frozen=True, kw_only=True)
class Solving:
    """The settings of a planner that solves an integer program.

    Attributes:
        most_blocks: the largest number of blocks, or groups, of operators to which a graph is contracted;
            None for two per device, as in NetSplit.
        seconds: the time limit, to which the limit on the solver's effort is proportional; an assumption
            about how long a person waits.
        balance: the largest share of all stored and saved bytes on one device; 0.5 is even, 1 means no rule.
    """

    most_blocks: int | None = None
    seconds: float = 60.0
    balance: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExactPlanner:
    """A planner that solves an integer program, with the program's rules and limits.

    Attributes:
        name: the planner's name.
        exclusive: whether a device, and a lane of a link, does one thing at a time.
        backward: whether the program schedules backward, too.
        groups: whether operators are timed one by one, and groups share a device; otherwise blocks of
            operators run without a break.
        knows_memory: whether the program limits the memory of devices from the start.
        devices: the only number of devices that the planner supports; None for any.
        most_operators: the most blocks that the planner supports.
        promise: the reason why the program's step time for its solution is shorter than the simulated one.
    """

    name: str
    exclusive: bool = True
    backward: bool = True
    groups: bool = False
    knows_memory: bool = True
    devices: int | None = None
    most_operators: float = math.inf
    promise: str = "in the simulation messages queue in another order, and blocks run in one go"

    def place(
        self, problem: PlacementProblem, memory_limit_bytes: float | None, seed: int, settings: Solving
    ) -> PlacedAnswer:
        """Return the best placement found, with notes on the program's step time and the proven gap.

        Raises:
            UnsuitableError: the number of devices is not supported, or the graph cannot be contracted far
                enough.
            MissingExtraError: OR-tools is not installed.
            InfeasibleError: no placement found fits when simulated and obeys the rules.
        """
        if self.devices not in (None, count := problem.devices.count):
            raise UnsuitableError(
                f"{self.name} places on {self.devices} devices; this cluster has {count}; use netsplit, or "
                f"give {self.name} {self.devices} devices"
            )
        cp_sat(self.name)
        problem = limited(problem, memory_limit_bytes)
        most = settings.most_blocks or _GROUPS_PER_DEVICE * count
        contraction = _in_groups(problem, most) if self.groups else contracted(problem, most)
        if (blocks := len(contraction.groups)) > self.most_operators:
            raise UnsuitableError(
                f"{problem.size} operators can only be contracted to {blocks} blocks; {self.name} takes at "
                f"most {self.most_operators}; use netsplit or dpos"
            )
        return _Runs(self, settings, contraction, problem).answer(seed)


def contracted(problem: PlacementProblem, most_blocks: int) -> Contraction:
    """Return the problem in at most ``most_blocks`` blocks, with one operator per block if that is possible.

    A block has at most a quarter of a device's share of operators, computation and memory, so that blocks can
    still be placed in several ways. While there are too many blocks, these limits are doubled.
    """
    contraction = contract(problem, [[o] for o in range(problem.size)])
    # A quarter of a device's share is an assumption: larger blocks leave less to decide, smaller ones leave
    # too many of them.
    share = 1 / (4 * problem.devices.count)
    while len(contraction.groups) > most_blocks and share < 2:
        contraction = co_place(problem, GroupLimits.of_shares(problem, share, most_blocks))
        share *= 2
    return contraction


def _in_groups(problem: PlacementProblem, most: int) -> Contraction:
    if problem.size > most:
        problem = replace(problem, together=(*problem.together, *share_devices(problem, most)))
    return contract(problem, [[o] for o in range(problem.size)])


class _Runs:
    """Runs of an integer program with lower and lower capacities until its solution fits.

    Attributes:
        outcomes: the outcome of each run.
        nearest: of the solutions that do not fit, the one that exceeds a device's memory least.
    """

    def __init__(
        self, program: ExactPlanner, settings: Solving, contraction: Contraction, problem: PlacementProblem
    ):
        self.program, self.settings = program, settings
        self.contraction, self.blocks, self.problem = contraction, contraction.problem, problem
        self.rules = Rules(exclusive=program.exclusive, backward=program.backward, balance=settings.balance)
        self.capacity = self.blocks.devices.capacity_bytes.astype(float)
        if not program.knows_memory:
            self.capacity = np.full_like(self.capacity, np.inf)
        # Only the size of a tick depends on this: as devices may do several things at once it is no bound.
        backward = self.blocks.backward_s * program.backward
        self.grid = Grid.of(self.blocks, lower_bound_s(replace(self.blocks, backward_s=backward)))
        self.effort = effort_of(settings.seconds)
        self.end = time.monotonic() + settings.seconds
        self.outcomes: list[SolverOutcome] = []
        self.nearest: SimulatedPlacement | None = None

    def answer(self, seed: int) -> PlacedAnswer:
        start, begun = self._start(seed) if self.program.exclusive else None, None
        found = self._solve(seed, start)
        if start is not None:
            begun = self._expanded(start.placement)
        fitting = [each for each in (found, begun) if each is not None and each.fits()]
        if not fitting:
            raise InfeasibleError(self._refusal())
        best = min(fitting, key=lambda each: each.time_s)
        bound_s = lower_bound_s(self.problem)
        # A bound proven over operators, not blocks, with all of the memory holds for every placement.
        if self.program.exclusive and self.blocks is self.problem:
            bound_s = max(bound_s, min(self.outcomes[0].bound_s, best.time_s))
        return PlacedAnswer(best.placement, tuple(self._notes(found, best, bound_s)))

    def _expanded(self, placement: Placement) -> SimulatedPlacement:
        return simulate_placement(self.contraction.whole, self.contraction.expand(placement))

    def _start(self, seed: int) -> SimulatedPlacement | None:
        placements = [*heuristics(self.blocks, seed)]
        if self.rules.balance < 1:
            # The heuristics know nothing of a balance: the model's order cut in two, anywhere.
            of = units_of(self.blocks).of
            halves = ([int(unit >= first) for unit in of] for first in range(1, max(of) + 1))
            placements += [Placement.in_order(half, self.blocks.devices.count) for half in halves]
        simulated = (
            simulate_placement(self.blocks, p)
            for p in placements
            if possible(self.blocks, p) and obeys(self.blocks, p.device, self.rules)
        )
        return min((s for s in simulated if s.fits()), key=lambda s: s.time_s, default=None)

    def _solve(self, seed: int, start: SimulatedPlacement | None) -> SimulatedPlacement | None:
        hint, most_s = start, _serial_s(self.blocks) if start is None else start.time_s
        while True:
            outcome = solve(
                PlacementProgram(self.blocks, self.rules, self.grid, most_s, self.capacity.tolist()),
                seed=seed + len(self.outcomes),
                effort=_FIRST * self.effort,
                seconds=max(self.end - time.monotonic(), 0.0),
                hint=hint,
            )
            self.effort -= outcome.effort
            self.outcomes.append(outcome)
            if outcome.placement is None:
                return None
            simulated = self._expanded(outcome.placement)
            if simulated.fits():
                return simulated
            if self.nearest is None or simulated.excess_bytes.max() < self.nearest.excess_bytes.max():
                self.nearest = simulated
            if self.effort <= 0 or time.monotonic() >= self.end:
                return None
            self.capacity = self._less_room(simulated, outcome.placement.device)
            # With less room the hint may be no solution, and OR-tools 9.15 ends the process where it is given
            # one and then finds that there is none ("heuristics.fixed_search").
            hint = None

    def _less_room(self, simulated: SimulatedPlacement, device: Sequence[int]) -> Floats:
        """Return the capacity of the next run, (devices,): the bytes that the memory rule counts for the
        solution, less those by which the simulated peak exceeds a device's memory. All devices get the same
        capacity, as the solver would otherwise only swap equal devices.
        """
        if np.isinf(self.capacity).any():
            return self.blocks.devices.capacity_bytes.astype(float)
        over = simulated.excess_bytes
        counted = lasting_units(self.blocks, device) * unit_bytes(self.blocks)
        return np.minimum(self.capacity, max(0.0, float((counted - over)[over > 0].min())))

    def _contracted(self) -> str:
        before, after = self.problem.size, len(self.contraction.groups)
        return f"{before} operators contracted to {after} blocks" if after < before else ""

    def _balanced(self) -> str:
        share = self.rules.balance
        return "" if share >= 1 else f" with at most {share:.0%} of all stored and saved bytes on one device"

    def _refusal(self) -> str:
        devices = self.blocks.devices
        most = devices.in_all(float(devices.capacity_bytes.max()))
        within = f" within {format_bytes(most)} on {devices.count} devices" if math.isfinite(most) else ""
        none = ", and its program has no solution" if math.isinf(self.outcomes[0].bound_s) else ""
        near = ""
        if self.nearest is not None:
            excess = format_bytes(float(self.nearest.excess_bytes.max()))
            near = f"; the nearest placement needs {excess} more on one device"
        remedy = "use more devices or another planner"
        if self._balanced():
            remedy = "or use netsplit or dpos, which have no such rule"
        words = f"{self.program.name} finds no plan{within}{self._balanced()}{none}{near}"
        return "; ".join(filter(None, (words, self._contracted(), f"raise the limit, {remedy}")))

    def _notes(
        self, found: SimulatedPlacement | None, best: SimulatedPlacement, bound_s: float
    ) -> Iterator[str]:
        outcome = self.outcomes[-1]
        if contracted := self._contracted():
            yield contracted
        if found is not None:
            yield (
                f"the program computes {format_seconds(outcome.time_s)} for its answer, the simulator "
                f"{format_seconds(found.time_s)}: {self.program.promise}"
            )
        if best is not found:
            yield f"the heuristics' placement was not improved: it takes {format_seconds(best.time_s)}"
        if words := outcome.ended(self.settings.seconds):
            yield words
        if before := len(self.outcomes) - 1:
            yield (
                f"solved {before} times more with less room on the devices, as the answer did not fit when "
                "simulated"
            )
        gap = max(0.0, 1 - bound_s / best.time_s)
        percent = f"{gap:.2%} proven" if gap > ROUNDING else "0.00% proven, up to rounding"
        yield f"gap {percent}: nothing{self._balanced()} is faster than {format_seconds(bound_s)}"


def _serial_s(problem: PlacementProblem) -> float:
    """Return an upper bound in seconds on a useful step: all operators and messages one after another."""
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum()
    devices = problem.devices
    slowest = sum(devices.latency_s.max() + t.bytes * devices.seconds_per_byte.max() for t in problem.tensors)
    return float(work + 2 * devices.count * slowest)
