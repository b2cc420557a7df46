"""Seconds as whole ticks, rounded down so that what is proven for ticks is proven for seconds; and a first
bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensoropt.placement import PlacementProblem

if TYPE_CHECKING:
    pass


ROUNDING = 1e-3
"""The most that rounding may take off a step, as a share of it."""


@dataclass(frozen=True)
class Grid:
    """A grid of whole ticks for seconds.

    A step is a chain of at most ``4 n m + 1`` tasks (every operator forward and backward, a message before
    each of them, for m micro-batches, and an optimizer step), each shortened by less than a tick.
    """

    tick_s: float

    @classmethod
    def of(cls, problem: PlacementProblem, bound_s: float) -> Grid:
        """Return the coarsest grid that shortens no step by more than :data:`ROUNDING`, given a lower bound
        on a step."""
        return cls(ROUNDING * bound_s / (4 * problem.size * problem.micro_batches + 1))

    def ticks(self, seconds: float) -> int:
        """Return the ticks of so many seconds, rounded down; 0 for what is impossible anyway, which no
        solution contains."""
        if not math.isfinite(seconds):
            return 0
        # For a whole number of ticks the division may be an ulp too small.
        return math.floor(seconds / self.tick_s + 1e-9)


def lower_bound_s(problem: PlacementProblem) -> float:
    """Return the seconds that no placement beats: the longest chain of operators, or the work of all
    micro-batches spread evenly."""
    forward, backward = problem.forward_s.min(axis=1), problem.backward_s.min(axis=1)
    ahead, finish = forward.copy(), backward.copy()
    for reader in range(problem.size):
        before = (ahead[problem.tensors[t].producer] for t in problem.read[reader])
        ahead[reader] += max(before, default=0.0)
    # Backward of an operator waits for its own forward and for the gradients of its readers. Messages and the
    # optimizer count nothing, so that this stays below every placement's step.
    for producer in reversed(range(problem.size)):
        tensors = (problem.tensors[t] for t in problem.made[producer])
        gradients = [finish[r] for t in tensors if t.gradient for r in t.readers]
        finish[producer] += max([ahead[producer], *gradients])
    once = problem.micro_batches * (problem.forward_s + problem.backward_s)
    work = (once + problem.update_s).min(axis=1).sum()
    return float(max(finish.max(initial=0.0), work / problem.devices.count))
