"""The rounds of an exact planner: its program, solved until the bound meets the simulator or effort is spent.

The program starts from the best known schedule, and the better placements it finds are simulated. If the
simulator disagrees with a proven optimum, that placement is forbidden (few operators) or the device that
overflowed gets less room, and the program is solved once more while there is effort left.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.placed.common.contraction import Contraction
from tensoropt.planners.placed.exact.grid import ROUNDING, Grid, lower_bound_s
from tensoropt.planners.placed.exact.known_placements import KnownPlacements
from tensoropt.planners.placed.exact.program import PlacementProgram
from tensoropt.planners.placed.exact.rules import obeys
from tensoropt.planners.placed.exact.settings import ExactSettings
from tensoropt.planners.placed.exact.solver import EFFORT_PER_SECOND, SolverOutcome, solve
from tensoropt.planners.placed.exact.warm_start import ordered, starts

CUT_BLOCKS = 12
"""The number of blocks up to which a placement that is slower when simulated than in the program is forbidden
as a whole. An assumption: with more blocks there are so many placements that forbidding one gains little.
"""

ROUNDS = 200
"""The most rounds, each with a run of the solver; an assumption. Effort or time usually end them first."""

SIMULATED_PER_RUN = 8
"""How many of the placements that one run of the solver found are simulated, the last and best first; an
assumption, as simulating takes time too.
"""


@dataclass(frozen=True)
class Proof:
    """The state of knowledge after the last round.

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

    def __init__(self, settings: ExactSettings, contraction: Contraction, known: KnownPlacements, seed: int):
        self.settings, self.contraction, self.known, self.seed = settings, contraction, known, seed
        self.blocks = contraction.problem
        self.whole = self.blocks is contraction.whole
        self.longest_s = self.blocks.micro_batches * _serial_s(self.blocks)
        self.hint = self._hint()
        self.floor_s = lower_bound_s(self.blocks)
        self.capacity = self.blocks.devices.capacity_bytes.astype(float)
        # Memory over time takes intervals for every tensor on every device: it is followed only where memory
        # is known to be tight. NetSplit as published has no such rule.
        # With several micro-batches the program knows only one, and not the memory of the others beside it.
        follows = settings.rules.exclusive and self.blocks.micro_batches == 1
        self.rules = replace(settings.rules, lifetimes=follows and self._tight())
        self.effort = settings.seconds * EFFORT_PER_SECOND
        self.end = time.monotonic() + settings.seconds
        self.tightened = self.cut = False

    def solve(self) -> Proof:
        """Return what is known after the last round; placements go to ``known`` as they are found."""
        proof = Proof(self.floor_s)
        # The warm start is proven already, up to the rounding of ticks.
        if self.known.best_s * (1 - ROUNDING) <= self.floor_s:
            return proof
        program = self._program()
        for number in range(ROUNDS):
            found: list[Placement] = []
            outcome = solve(
                program,
                # The rounds differ from one another, but each is the same for the same seed.
                seed=self.seed + number,
                effort=self.effort if self._is_last_round() else self.effort / 2,
                seconds=max(self.end - time.monotonic(), 0.0),
                # Once something is forbidden the hint may be no solution, and OR-tools 9.15 ends the process
                # where it is given one and then finds that there is none ("heuristics.fixed_search").
                hint=None if self.cut or self.tightened else self.hint,
                found=found.append,
            )
            self.effort -= outcome.effort
            own = self._simulate_found(found) or proof.own
            proof = Proof(self._bound(proof, outcome), outcome, own)
            if not self._again(proof):
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
        follows = self.rules.exclusive and self.blocks.micro_batches == 1
        return self.rules.lifetimes or not follows or bool(np.isinf(self.capacity).all())

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

    def _again(self, proof: Proof) -> bool:
        """Return whether the simulator disagrees with the program, and something can be done about it."""
        outcome, own = proof.last, proof.own
        if outcome is None or own is None or outcome.placement is None:
            return False
        if self.effort <= 0 or time.monotonic() >= self.end:
            return False
        if not own.fits() and not self._is_last_round():
            return True
        met = proof.bound_s >= self.known.best_s * (1 - ROUNDING)
        return outcome.proven and not met and (self.cuts or not own.fits())

    @property
    def cuts(self) -> bool:
        """Whether a placement that is slower than the program takes it to be may be forbidden."""
        return self.settings.rules.exclusive and self.blocks.size <= CUT_BLOCKS

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

    def _hint(self) -> SimulatedPlacement | None:
        """Return the best known schedule that obeys the rules, for one micro-batch as in the program; a
        placement of blocks is simulated whole, too."""
        best, rules = self.known.best, self.settings.rules
        simulated_ones = []
        for source, placement in starts(self.blocks, rules, self.seed):
            simulated_ones.append(simulate_placement(self.blocks, placement))
            if not self.whole:
                self.known.consider(self.contraction.expand(placement), f"{source} over blocks")
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
        one = replace(self.blocks, micro_batches=1)
        hint = simulate_placement(one, best_of_blocks.placement)
        self.longest_s = max(best_of_blocks.time_s, hint.time_s)
        return hint

    def _simulate_found(self, found: list[Placement]) -> SimulatedPlacement | None:
        """Return the simulated step of the program's last and best placement; those before it are simulated
        as well."""
        own: SimulatedPlacement | None = None
        for number, placement in enumerate(reversed(found)):
            if number >= SIMULATED_PER_RUN and self.known.best is not None:
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


def _serial_s(problem: PlacementProblem) -> float:
    """Return more seconds than any sensible schedule takes: everything one after another, and every message
    on top."""
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum()
    devices = problem.devices
    slowest = sum(devices.latency_s.max() + t.bytes * devices.seconds_per_byte.max() for t in problem.tensors)
    return float(work + 2 * devices.count * slowest)
