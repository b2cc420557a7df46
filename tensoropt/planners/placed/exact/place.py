"""The procedure that the exact planners share: a warm start, a program, and the simulator to check both.

1. The heuristics place the problem; the best of them when simulated is the warm start.
2. A graph too large for the program is contracted by node co-placement (:mod:`.coplacement`).
3. The program starts from the best known schedule; the better placements it finds are simulated.
4. If the simulator disagrees with a proven optimum, that placement is forbidden (few operators) or the
   device that overflowed gets less room, and the program is solved once more while there is effort left
   (:mod:`.rounds`).

The answer is the fastest placement that was simulated, that fits and that obeys the planner's rules; it is
never a program's own opinion. A placement that breaks a rule is neither an answer nor a bound for one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.answer import PlacedAnswer
from tensoropt.planners.placed.common.contraction import Contraction, contract
from tensoropt.planners.placed.common.coplacement import GroupLimits, co_place
from tensoropt.planners.placed.exact.known_placements import KnownPlacements
from tensoropt.planners.placed.exact.notes import Notes, refusal
from tensoropt.planners.placed.exact.rounds import Rounds
from tensoropt.planners.placed.exact.settings import ExactSettings
from tensoropt.planners.placed.exact.warm_start import starts
from tensoropt.planners.solvers import cp_sat

SHARE = 0.25
"""The share of a planner's seconds for a step of several micro-batches: usually several counts are tried, and
together they should not take several times as long. An assumption."""


def limited(problem: PlacementProblem, memory_limit_bytes: float | None) -> PlacementProblem:
    """Return the problem with a limit as its devices' capacity, if that is less."""
    if memory_limit_bytes is None:
        return problem
    capacity = problem.devices.within(memory_limit_bytes)
    return replace(problem, devices=replace(problem.devices, capacity_bytes=capacity))


def contracted(problem: PlacementProblem, most_blocks: int) -> Contraction:
    """Return the problem in at most so many blocks, with one operator per block if that is possible.

    Co-placement's limits leave the program a choice: no block of more than a quarter of a device's share of
    operators, work and memory. If they leave too many blocks, they are doubled until they do not.
    """
    if problem.size <= most_blocks:
        return contract(problem, [[o] for o in range(problem.size)])
    devices = problem.devices.count
    lasting = [problem.step_bytes(o) for o in range(problem.size)]
    work = (problem.forward_s + problem.backward_s + problem.update_s).min(axis=1)
    # A quarter of a device's share is an assumption: larger blocks leave less to decide, smaller ones leave
    # too many of them.
    share = 1 / (4 * devices)
    while True:
        found = co_place(
            problem,
            GroupLimits(
                most_operators=math.ceil(share * problem.size),
                most_groups=most_blocks,
                # The largest operator alone may exceed its share and is a block all the same.
                most_bytes=max(share * sum(lasting), max(lasting)),
                most_seconds=max(share * float(work.sum()), float(work.max())),
            ),
        )
        if len(found.groups) <= most_blocks or share >= 1:
            return found
        share *= 2


def place_exactly(problem: PlacementProblem, seed: int, settings: ExactSettings) -> PlacedAnswer:
    """Return the fastest placement found within the devices' capacity, and what is proven about it.

    Raises:
        MissingExtraError: OR-tools is not installed.
        UnsuitableError: too many blocks remain.
        InfeasibleError: nothing found fits and obeys the rules; the message says what prevents it.
    """
    # Refused before the heuristics have run.
    cp_sat(settings.name)
    if problem.micro_batches > 1:
        settings = replace(settings, seconds=SHARE * settings.seconds)
    contraction = contracted(problem, settings.most_blocks)
    if settings.most_after_all is not None and len(contraction.groups) > settings.most_after_all:
        raise UnsuitableError(
            f"{problem.size} operators can only be contracted to {len(contraction.groups)} blocks; "
            f"the program takes {settings.most_after_all}; use netsplit or dpos"
        )
    known = KnownPlacements(problem, settings.rules)
    for source, placement in starts(problem, settings.rules, seed):
        known.consider(placement, source)
    warm = known.best
    proof = Rounds(settings, contraction, known, seed).solve()
    if known.best is None:
        raise InfeasibleError(refusal(settings, known, contraction, proof))
    notes = Notes(settings, contraction, known, known.best, warm, proof).lines()
    return PlacedAnswer(known.best.simulated.placement, tuple(notes))
