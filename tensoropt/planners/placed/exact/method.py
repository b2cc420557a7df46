"""What the exact planners share: a warm start, a program, the judge over both.

1. The heuristics place the problem; the best under the judge is the warm start.
2. A graph too large for the program is contracted by node co-placement (:mod:`.coplacement`).
3. The program starts from the best known schedule; the better placements it finds are played by the judge.
4. Where the judge disagrees with a proven optimum, that placement is forbidden (few operators) or the device
   that overflowed gets less room, and the program is solved again while there is effort left.

The answer is the fastest placement that the judge has seen, that fits and that keeps to the planner's rules,
never a program's own opinion. What breaks a rule is neither an answer nor a bound for one.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.placed.contraction import Contraction, contract
from tensoropt.planners.placed.coplacement import GroupLimits, co_place
from tensoropt.planners.placed.exact.outcome import Notes, Proof, Search, refusal
from tensoropt.planners.placed.exact.program import ROUNDING, Grid, Program, lower_bound_s
from tensoropt.planners.placed.exact.rules import obeys
from tensoropt.planners.placed.exact.solver import EFFORT_PER_SECOND, Outcome, solve
from tensoropt.planners.placed.exact.warm_start import Candidates, ordered, starts
from tensoropt.planners.placed.placing import PlacedAnswer
from tensoropt.planners.registry import UnsuitableError, cp_sat

CUT_BLOCKS = 12
"""Up to so many blocks a placement that the judge plays slower than the program is forbidden as a whole."""

ROUNDS = 200

PLAYED = 8
"""So many of the placements that one run of the solver found are played, the last and best first."""


def limited(problem: PlacementProblem, memory_limit_bytes: float | None) -> PlacementProblem:
    """The problem with a limit as its devices' capacity, where that is less."""
    if memory_limit_bytes is None:
        return problem
    capacity = np.minimum(problem.devices.capacity_bytes, memory_limit_bytes)
    return replace(problem, devices=replace(problem.devices, capacity_bytes=capacity))


def contracted(problem: PlacementProblem, most_blocks: int) -> Contraction:
    """The problem in at most so many blocks, each operator its own where that is possible.

    Co-placement's limits leave the program a choice: no block of more than a quarter of a device's share of
    operators, work and memory. Where they leave too many blocks they are doubled until they do not.
    """
    if problem.size <= most_blocks:
        return contract(problem, [[o] for o in range(problem.size)])
    devices = problem.devices.count
    held = [problem.step_bytes(o) for o in range(problem.size)]
    work = (problem.forward_s + problem.backward_s + problem.update_s).min(axis=1)
    share = 1 / (4 * devices)
    while True:
        found = co_place(
            problem,
            GroupLimits(
                most_operators=math.ceil(share * problem.size),
                most_groups=most_blocks,
                most_bytes=max(share * sum(held), max(held)),
                most_seconds=max(share * float(work.sum()), float(work.max())),
            ),
        )
        if len(found.groups) <= most_blocks or share >= 1:
            return found
        share *= 2


def place_exactly(problem: PlacementProblem, seed: int, search: Search) -> PlacedAnswer:
    """The fastest placement found within the devices' capacity, and what is proven of it.

    Raises:
        MissingExtraError: OR-tools is not installed.
        UnsuitableError: too many blocks remain.
        InfeasibleError: nothing found fits and keeps to the rules; says what stands against.
    """
    cp_sat(search.name)
    contraction = contracted(problem, search.most_blocks)
    if search.most_after_all is not None and len(contraction.groups) > search.most_after_all:
        raise UnsuitableError(
            f"{problem.size} operators can only be contracted to {len(contraction.groups)} blocks; "
            f"the program takes {search.most_after_all}; use netsplit or dpos"
        )
    candidates = Candidates(problem, search.rules)
    for source, placement in starts(problem, search.rules, seed):
        candidates.consider(placement, source)
    warm = candidates.best
    proof = _Rounds(search, contraction, candidates, seed).run()
    if candidates.best is None:
        raise InfeasibleError(refusal(search, candidates, contraction, proof))
    notes = Notes(search, contraction, candidates, candidates.best, warm, proof).lines()
    return PlacedAnswer(candidates.best.simulated.placement, tuple(notes))


class _Rounds:
    """The program, solved until its bound meets the judge or its effort is spent."""

    def __init__(self, search: Search, contraction: Contraction, candidates: Candidates, seed: int):
        self.search, self.contraction, self.candidates, self.seed = search, contraction, candidates, seed
        self.blocks = contraction.problem
        self.whole = self.blocks is contraction.whole
        self.hint = self._hint()
        self.floor_s = lower_bound_s(self.blocks)
        self.capacity = self.blocks.devices.capacity_bytes.astype(float)
        self.rules = replace(search.rules, lifetimes=search.rules.exclusive and self._tight())
        self.effort = search.seconds * EFFORT_PER_SECOND
        self.end = time.monotonic() + search.seconds
        self.tightened = self.cut = False

    def run(self) -> Proof:
        proof = Proof(self.floor_s)
        if self.candidates.best_s * (1 - ROUNDING) <= self.floor_s:
            return proof
        program = self._program()
        for number in range(ROUNDS):
            found: list[Placement] = []
            outcome = solve(
                program,
                seed=self.seed + number,
                effort=self.effort if self._settled() else self.effort / 2,
                seconds=max(self.end - time.monotonic(), 0.0),
                hint=self.hint,
                found=found.append,
            )
            self.effort -= outcome.effort
            own = self._play(found) or proof.own
            proof = Proof(self._bound(proof, outcome), outcome, own)
            if not self._again(proof):
                break
            program = self._next(program, proof)
        self._reorder(proof)
        return proof

    def _program(self) -> Program:
        grid = Grid.of(self.blocks, self.floor_s)
        longest_s = self.hint.time_s if self.hint is not None else _serial_s(self.blocks)
        return Program(self.blocks, self.rules, grid, longest_s, self.capacity.tolist())

    def _tight(self) -> bool:
        """Whether memory is known to exclude something faster than the best."""
        nearest = self.candidates.nearest
        return nearest is not None and nearest.simulated.time_s < self.candidates.best_s

    def _settled(self) -> bool:
        """Whether no other round is planned: the first leaves half the effort to one that knows lifetimes."""
        return self.rules.lifetimes or not self.rules.exclusive or bool(np.isinf(self.capacity).all())

    def _next(self, program: Program, proof: Proof) -> Program:
        """The program of the next round, given a placement that the judge sees otherwise."""
        own, outcome = proof.own, proof.last
        assert own is not None
        assert outcome is not None
        if not own.fits() and not self._settled():
            self.rules = replace(self.rules, lifetimes=True)
            return self._program()
        if self.cuts:
            assert outcome.placement is not None
            self.cut = True
            program.forbid(outcome.placement)
            if self.candidates.best is not None:
                program.demand(less_than_s=self.candidates.best_s)
            return program
        over = np.array(own.peak_bytes) - self.blocks.devices.capacity_bytes
        self.capacity, self.tightened = self.capacity - np.maximum(over, 0.0), True
        return self._program()

    def _again(self, proof: Proof) -> bool:
        """Whether the judge disagrees with the program, and something can be done about it."""
        outcome, own = proof.last, proof.own
        if outcome is None or own is None or outcome.placement is None:
            return False
        if self.effort <= 0 or time.monotonic() >= self.end:
            return False
        if not own.fits() and not self._settled():
            return True
        met = proof.bound_s >= self.candidates.best_s * (1 - ROUNDING)
        return outcome.proven and not met and (self.cuts or not own.fits())

    @property
    def cuts(self) -> bool:
        return self.search.rules.exclusive and self.blocks.size <= CUT_BLOCKS

    def _bound(self, proof: Proof, outcome: Outcome) -> float:
        """Forbidden placements have been played, so the best of them bounds as well; less room does not."""
        if self.tightened:
            return proof.bound_s
        played_s = self.candidates.best_s if self.cut else math.inf
        return max(proof.bound_s, min(outcome.bound_s, played_s))

    def _hint(self) -> SimulatedPlacement | None:
        """The best known schedule that keeps to the rules; what is made of blocks is played whole, too."""
        best, rules = self.candidates.best, self.search.rules
        simulated_ones = []
        for source, placement in starts(self.blocks, rules, self.seed):
            simulated_ones.append(simulate_placement(self.blocks, placement))
            if not self.whole:
                self.candidates.consider(self.contraction.expand(placement), f"{source} over blocks")
        if best is not None and not self.whole:
            device = self.contraction.majority(best.simulated.placement.device)
            simulated_ones += [
                simulate_placement(self.blocks, p) for _, p in ordered(self.blocks, device, self.seed)
            ]
        allowed = (
            simulated
            for simulated in simulated_ones
            if simulated.fits() and obeys(self.blocks, simulated.placement.device, rules)
        )
        return min(allowed, key=lambda simulated: simulated.time_s, default=None)

    def _play(self, found: list[Placement]) -> SimulatedPlacement | None:
        """What the program found as the judge plays it; the play of the last, its best."""
        own: SimulatedPlacement | None = None
        for number, placement in enumerate(reversed(found)):
            if number >= PLAYED and self.candidates.best is not None:
                break
            simulated = self.candidates.consider(self.contraction.expand(placement), "the program")
            own = own or simulated
        return own

    def _reorder(self, proof: Proof) -> None:
        """The program's devices with orders of single operators instead of blocks."""
        if proof.own is not None and not self.whole:
            whole = self.contraction.whole
            for source, placement in ordered(whole, proof.own.placement.device, self.seed):
                self.candidates.consider(placement, f"the program, ordered by {source}")


def _serial_s(problem: PlacementProblem) -> float:
    """Longer than any sensible schedule: everything after everything else, and every message on top."""
    seconds = problem.forward_s + problem.backward_s + problem.update_s
    work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum()
    devices = problem.devices
    slowest = sum(devices.latency_s.max() + t.bytes * devices.seconds_per_byte.max() for t in problem.tensors)
    return float(work + 2 * devices.count * slowest)
