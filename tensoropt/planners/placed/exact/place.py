"""The procedure that the exact planners share: a program, a search, and the simulator to check both.

1. The heuristics place the problem; a program is warm-started from the best of them when simulated.
2. A graph too large for the program is contracted by node co-placement (``common/contraction.py``).
3. The program starts from the best known schedule of its blocks; the better placements it finds are
   simulated.
4. If the simulator disagrees with a proven optimum, that placement is forbidden (few operators) or the
   device that overflowed gets less room, and the program is solved once more while there is effort left
   (:mod:`.rounds`).
5. Where nothing is proven, a neighbourhood search goes on from there (:mod:`.neighbourhood`).

The answer is the fastest placement of the program and the search that was simulated, that fits and that obeys
the planner's rules; it is never a program's own opinion. If the program knows all placements, the heuristics'
are among its own; otherwise the heuristics' placements of the whole graph are no answers, even if they are
faster: the notes name them. A placement that breaks a rule is neither an answer nor a bound for one.

The notes on an exact planner's answer say which method found it and what is proven about it, or why there is
none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem
from tensoropt.planners.compare import cp_sat
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.contraction import Contraction, GroupLimits, co_place, contract
from tensoropt.planners.placed.common.units import PlacedAnswer, units_of
from tensoropt.planners.placed.exact.neighbourhood import SearchEffort, search
from tensoropt.planners.placed.exact.rounds import (
    ExactSettings,
    KnownPlacement,
    KnownPlacements,
    Proof,
    Rounds,
    effort_words,
    starts,
)
from tensoropt.planners.placed.exact.rules import (
    Rules,
    all_once_bytes,
    fullest_share,
    lasting_bytes,
    rule_words,
)
from tensoropt.planners.placed.exact.variables import ROUNDING, lower_bound_s
from tensoropt.units import format_bytes, format_seconds


class _Notes:
    """The notes on an answer."""

    def __init__(
        self,
        settings: ExactSettings,
        contraction: Contraction,
        known: KnownPlacements,
        best: KnownPlacement,
        heuristic: KnownPlacement | None,
        proof: Proof,
        searched: SearchEffort | None,
    ):
        self.settings, self.contraction, self.proof = settings, contraction, proof
        self.broken = known.broken
        self.best, self.heuristic, self.searched = best, heuristic, searched

    def lines(self) -> list[str]:
        """Return the notes, a sentence each, without those that do not apply."""
        return [
            line
            for line in (
                self._origin(),
                self._faster(),
                self._broken(),
                self._blocks(),
                self._search(),
                self._gap(),
                self._effort(),
                self._fill(),
                self._own(),
            )
            if line
        ]

    def _origin(self) -> str:
        took = format_seconds(self.best.simulated.time_s)
        if self.heuristic is None:
            ruled = " and keeps to the rules" if rule_words(self.settings.rules) else ""
            return f"no heuristic found a placement that fits{ruled}; {self.best.source} did, {took}"
        before = format_seconds(self.heuristic.simulated.time_s)
        if self.best.simulated.placement == self.heuristic.simulated.placement:
            return f"the warm start stands: nothing simulated is faster than {self.best.source}, {took}"
        return (
            f"found by {self.best.source}: {took}; the fastest heuristic, {self.heuristic.source}: {before}"
        )

    def _faster(self) -> str:
        """Name a heuristic that is faster than the answer."""
        if self.heuristic is None or self.heuristic.simulated.time_s >= self.best.simulated.time_s:
            return ""
        return f"{self.heuristic.source} is faster"

    def _broken(self) -> str:
        """Name a faster placement that breaks a rule, and so is not the answer."""
        if self.broken is None or self.broken.simulated.time_s >= self.best.simulated.time_s:
            return ""
        took = format_seconds(self.broken.simulated.time_s)
        return f"{self.broken.source}, {took}, is no answer: {_breach(self.settings.rules, self.broken)}"

    def _blocks(self) -> str:
        whole, blocks = self.contraction.whole.size, len(self.contraction.groups)
        return f"{whole} operators contracted to {blocks} blocks by co-placement" if blocks < whole else ""

    def _search(self) -> str:
        if self.searched is None:
            return ""
        return (
            f"neighbourhood search: {self.searched.tried:,} placements tried in {self.searched.chains} chains"
        )

    def _gap(self) -> str:
        """Say what is proven: about all placements if the program knew them all, otherwise about a bound for
        any placement.
        """
        took, whole, outcome = self.best.simulated.time_s, self.contraction.whole, self.proof.last
        floor_s, rules = lower_bound_s(whole), rule_words(self.settings.rules)
        # Over blocks the program does not know all placements, so that its bound is not one of the whole
        # graph.
        if len(self.contraction.groups) == whole.size:
            text = _proven(took, max(self.proof.bound_s, floor_s), " with " + rules if rules else "")
            return text if rules or outcome is not None else f"{text}; no program was needed for that"
        text = _proven(took, floor_s, "")
        if outcome is None:
            return f"{text}; nothing is faster over its blocks, so no program was solved"
        within = "over its blocks and rules"
        if self.proof.bound_s >= took * (1 - ROUNDING):
            return f"{text}; the program proves that nothing is faster {within}"
        if not math.isfinite(outcome.time_s):
            return text
        own = max(0.0, 1 - self.proof.bound_s / outcome.time_s)
        return f"{text}; the program's own gap, {within}, is {0.0 if own <= ROUNDING else own:.2%}"

    def _effort(self) -> str:
        outcome = self.proof.last
        if outcome is None:
            return ""
        return (
            effort_words(outcome, self.settings.seconds) or f"times rounded down by less than {ROUNDING:.1%}"
        )

    def _fill(self) -> str:
        """Say which part of a step with several micro-batches the program ignores."""
        if (count := self.best.simulated.micro_batches) == 1 or self.proof.last is None:
            return ""
        return (
            f"the program knows the work of {count} micro-batches and the schedule of one: how they fill and "
            "drain the devices is simulated only"
        )

    def _own(self) -> str:
        """Say where the simulator and the program disagree about the program's own answer."""
        outcome, own = self.proof.last, self.proof.own
        if outcome is None or own is None or outcome.placement is None:
            return ""
        if own.micro_batches > 1:  # of which the program schedules one, see _fill
            return ""
        program_s, simulated_s = outcome.time_s, own.time_s
        fits = "" if own.fits() else ", and it does not fit there"
        if not fits and abs(simulated_s - program_s) <= ROUNDING * simulated_s:
            return ""
        return (
            f"the program says {format_seconds(program_s)} of its own answer, the simulator "
            f"{format_seconds(simulated_s)}{fits}"
        )


def _proven(took_s: float, bound_s: float, within: str) -> str:
    gap = max(0.0, 1 - bound_s / took_s)
    if gap <= ROUNDING:  # the program's times are rounded down by as much
        return f"gap 0.00% proven, up to rounding: nothing{within} is faster than {format_seconds(bound_s)}"
    return f"gap {gap:.2%} proven: nothing{within} is faster than {format_seconds(bound_s)}"


def _breach(rules: Rules, broken: KnownPlacement) -> str:
    """Say how a placement breaks the rules."""
    if rules.balance is None or rules.balance >= 1:
        return f"it does not fit with {rule_words(rules)}"
    share = fullest_share(broken.simulated.problem, broken.simulated.placement.device, rules)
    return f"{share:.1%} of what is stored and kept is on one device, and the rule allows {rules.balance:.0%}"


def refusal(
    settings: ExactSettings,
    known: KnownPlacements,
    heuristics: KnownPlacements,
    contraction: Contraction,
    proof: Proof,
) -> str:
    problem = contraction.whole
    none = ", and none exists" if math.isinf(proof.bound_s) and contraction.problem is problem else ""
    if broken := known.broken or heuristics.broken:
        text = f"{settings.name} finds no plan with {rule_words(settings.rules)}{none}"
        text += _indivisible(settings.rules, contraction)
        text += f"; of the fastest that fits, {broken.source}, {_breach(settings.rules, broken)}"
        return f"{text}; use netsplit or dpos, which have no such rule"
    capacity = format_bytes(problem.devices.in_all(float(problem.devices.capacity_bytes.max())))
    text = f"{settings.name} finds no plan within {capacity} on {problem.devices.count} devices{none}"
    if heuristics.best is not None:
        took = format_seconds(heuristics.best.simulated.time_s)
        return f"{text}, and {heuristics.best.source} does: {took}; use that, or raise the limit"
    if nearest := _nearest(known, heuristics):
        text += f"; the nearest needs {format_bytes(nearest[0].excess_bytes)} more on one of them"
    return f"{text}; raise the limit, use more devices or a smaller batch"


def _indivisible(rules: Rules, contraction: Contraction) -> str:
    """Name the operators that must share a device and break the balance by themselves; empty if there are
    none.
    """
    if rules.balance is None:
        return ""
    problem = contraction.problem
    own, units = lasting_bytes(problem, rules.alpha), units_of(problem)
    lasting = [float(own[list(unit)].sum()) for unit in units.members]
    whole, largest = all_once_bytes(problem, rules), int(np.argmax(lasting))
    if lasting[largest] <= rules.balance * whole:
        return ""
    first, *companions = units.members[largest]
    name = problem.names[first] + (f" and {len(companions)} more that belong together" if companions else "")
    return f": {name} cannot be divided and holds {lasting[largest] / whole:.1%}"


_SHARE = 0.25
"""The share of a planner's seconds for a step of several micro-batches: usually several counts are tried, and
together they should not take several times as long. An assumption."""


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


def place_exactly(problem: PlacementProblem, seed: int, settings: ExactSettings) -> PlacedAnswer:
    """Return the fastest placement that the program and the search found within the devices' capacity, with
    notes on what is proven about it.

    Raises:
        MissingExtraError: OR-tools is not installed.
        UnsuitableError: too many blocks remain.
        InfeasibleError: nothing found fits and obeys the rules; the message says what prevents it.
    """
    # Refused before the heuristics have run.
    cp_sat(settings.name)
    if problem.micro_batches > 1:
        settings = replace(settings, seconds=_SHARE * settings.seconds, search_s=_SHARE * settings.search_s)
    contraction = contracted(problem, settings.most_blocks)
    if settings.most_after_all is not None and len(contraction.groups) > settings.most_after_all:
        raise UnsuitableError(
            f"{problem.size} operators can only be contracted to {len(contraction.groups)} blocks; "
            f"the program takes {settings.most_after_all}; use netsplit or dpos"
        )
    heuristics, known = KnownPlacements(problem, settings.rules), KnownPlacements(problem, settings.rules)
    for source, placement in starts(problem, settings.rules, seed):
        heuristics.consider(placement, source)
    proof = Rounds(settings, contraction, known, heuristics, seed).solve()
    whole = contraction.problem is problem
    bound_s = proof.bound_s if whole else lower_bound_s(problem)
    searched = None
    if settings.search_s and known.best_s * (1 - ROUNDING) > bound_s:
        begin = (*known.fastest[:1], *heuristics.fastest) or _nearest(known, heuristics)
        searched = search(known, begin, seed, settings.search_s)
    if known.best is None:
        raise InfeasibleError(refusal(settings, known, heuristics, contraction, proof))
    notes = _Notes(settings, contraction, known, known.best, heuristics.best, proof, searched).lines()
    return PlacedAnswer(known.best.simulated.placement, tuple(notes))


def _nearest(*known: KnownPlacements) -> tuple[KnownPlacement, ...]:
    """Return the placement that exceeds a device least, where none fits."""
    nearest = (each.nearest for each in known if each.nearest is not None)
    return tuple(sorted(nearest, key=lambda known: known.excess_bytes)[:1])
