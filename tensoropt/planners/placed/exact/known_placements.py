"""All placements of one problem that were simulated, and the best of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.planners.placed.exact.rules import Rules, obeys


@dataclass(frozen=True)
class KnownPlacement:
    """A simulated placement; ``source`` says who found it."""

    source: str
    simulated: SimulatedPlacement

    @property
    def excess_bytes(self) -> float:
        """Return by how many bytes the most overflowing device exceeds its capacity."""
        over = np.array(self.simulated.peak_bytes) - self.simulated.problem.devices.capacity_bytes
        return float(over.max())


@dataclass
class KnownPlacements:
    """All placements of one problem that were simulated.

    Attributes:
        rules: the rules that an answer must obey, beside fitting.
        best: the fastest placement that fits and obeys the rules.
        broken: the fastest placement that fits but breaks the rules.
        nearest: of the placements that do not fit, the one that exceeds a device least.
    """

    problem: PlacementProblem
    rules: Rules = field(default_factory=Rules)
    best: KnownPlacement | None = None
    broken: KnownPlacement | None = None
    nearest: KnownPlacement | None = None

    def consider(self, placement: Placement, source: str) -> SimulatedPlacement:
        """Return the simulated step of a placement, which is remembered if it is the best."""
        candidate = KnownPlacement(source, simulate_placement(self.problem, placement))
        simulated = candidate.simulated
        if not simulated.fits():
            if self.nearest is None or candidate.excess_bytes < self.nearest.excess_bytes:
                self.nearest = candidate
        # What breaks a rule must be neither the answer nor a bound on the program, however fast it is.
        elif obeys(self.problem, placement.device, self.rules):
            if simulated.time_s < self.best_s:
                self.best = candidate
        elif self.broken is None or simulated.time_s < self.broken.simulated.time_s:
            self.broken = candidate
        return simulated

    @property
    def best_s(self) -> float:
        """The seconds of the best placement; inf while there is none."""
        return self.best.simulated.time_s if self.best is not None else float("inf")
