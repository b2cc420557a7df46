"""Post: placements drawn from a distribution for each operator, which learns from the fast ones.

Y. Gao, L. Chen, B. Li, *Post: Device Placement with Cross-Entropy Minimization and Proximal Policy
Optimization*, NeurIPS 2018, algorithm 1. As published: a softmax distribution over the devices for each
group of operators, uniform at first; placements are drawn from it and timed one by one; after every ``K``
of them ten steps of gradient ascent on the objective of proximal policy optimization (PPO); after every
``N``, instead, the distribution is set to the one with the least cross-entropy to the fastest of the ``N``,
which is how often each device occurs among them for a group (equation 10), mixed with the uniform one.

Not as published:

- A placement is not run: its step is computed, by the flat form of the simulator.
- The groups are those of the model's operators that must share a device, where the paper has groups of
  TensorFlow's operations. Each device runs its operators in the model's order.
- The text of equation 11 was not at hand. Here it is PPO's objective with a penalty on the Kullback-Leibler
  divergence, whose weight adapts (J. Schulman et al., arXiv 1707.06347, section 4); the advantage of a
  placement is by how many standard deviations it is faster than the mean of its ``K``.
- The paper's numbers were not at hand either: those of :class:`Post` are ours, and so is the penalty
  for bytes that do not fit, where a run would end without a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax, rel_entr, softmax

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem
from tensoropt.placement.flat import FlatProblem, Integers, flat_step
from tensoropt.planners.placed.common.units import (
    MemoryBook,
    PlacedAnswer,
    Units,
    place_within_memory,
    units_of,
)
from tensoropt.planners.placed.local_search import TASKS_PER_SECOND
from tensoropt.types import Floats
from tensoropt.units import format_bytes

_ASCENTS = 10
"""The steps of gradient ascent of an update (algorithm 1, line 6)."""
_RATE = 0.05
"""The size of these steps; an assumption, as are all numbers below."""
_DIVERGENCE = 0.01
"""The divergence per group that the penalty aims at in an update."""
_LEAST_WEIGHT = 1.0
"""The least weight of the penalty: a distribution that has nearly settled diverges little, and with no weight
the next outlier among the placements would decide it."""
_MOST = 1.0
"""The largest log-ratio of probabilities that counts: it is a sum over all units, and one outlier
among the placements must not decide for all."""
_PENALTY = 4.0
"""The seconds for bytes that do not fit, as a share of the first step per share of all bytes."""


@dataclass(frozen=True, kw_only=True)
class Post:
    """The settings of the planner. The defaults are ours.

    Attributes:
        placements: the most placements that are timed (the paper's L).
        seconds: the effort that limits them on large models, in seconds of the machine where it was measured.
        per_ascent: placements between two improvements of the distribution by gradient ascent (K).
        per_fit: placements between two fits of the distribution to the fastest ones (N).
        elite: the share of placements that count as the fastest.
        uniform: the share of the uniform distribution that is mixed in after a fit (epsilon).
    """

    placements: int = 30_000
    seconds: float = 20.0
    per_ascent: int = 100
    per_fit: int = 1_000
    elite: float = 0.05
    uniform: float = 0.003


DEFAULTS = Post()


def place(
    problem: PlacementProblem, memory_limit_bytes: float | None, seed: int, settings: Post = DEFAULTS
) -> PlacedAnswer:
    """Return the fastest placement that was drawn and fits.

    Raises:
        InfeasibleError: no placement drawn fits.
    """
    units = units_of(problem)

    def attempt(memory: MemoryBook) -> PlacedAnswer:
        learner = _Learner(problem, units, memory, settings, seed)
        learner.run()
        if learner.best is None:
            most = problem.devices.in_all(float(problem.devices.within(memory_limit_bytes).max()))
            near = format_bytes(learner.least_excess_bytes)
            raise InfeasibleError(
                f"post finds no plan within {format_bytes(most)} on {problem.devices.count} devices: of "
                f"{learner.drawn:,} placements the nearest is {near} above; raise the limit, use more "
                "devices, or draw more (--planner-option post.placements=...)"
            )
        for unit, device in enumerate(learner.best.tolist()):
            memory.book(units, unit, device)
        placement = Placement.in_order(learner.best[learner.unit_of].tolist(), problem.devices.count)
        return PlacedAnswer(placement, (f"{learner.drawn:,} placements drawn",))

    return place_within_memory("post", problem, units, memory_limit_bytes, attempt)


class _Learner:
    def __init__(
        self, problem: PlacementProblem, units: Units, memory: MemoryBook, settings: Post, seed: int
    ):
        self.problem, self.units, self.memory, self.settings = problem, units, memory, settings
        self.random = np.random.default_rng(seed)
        self.flat = tuple(FlatProblem.of(problem))
        self.unit_of = np.array(units.of, dtype=np.int64)
        self.order = np.arange(problem.size)
        self.uniform = units.allowed / units.allowed.sum(axis=1, keepdims=True)
        self.chances = self.uniform
        self.divergence_weight = 1.0
        tasks = problem.micro_batches * ((1 + problem.training) * problem.size + len(problem.tensors))
        self.placements = min(settings.placements, max(1, int(settings.seconds * TASKS_PER_SECOND / tasks)))
        self.drawn = 0
        self.first_s = 0.0
        self.least_excess_bytes = np.inf
        self.best: Integers | None = None
        self.best_s = np.inf

    def run(self) -> None:
        per_ascent, per_fit = self.settings.per_ascent, self.settings.per_fit
        drawn: list[Integers] = []
        seconds: list[float] = []
        while self.drawn < self.placements:
            devices = self._draw()
            drawn.append(devices)
            seconds.append(self._time(devices))
            if self.drawn % per_fit == 0:
                self._fit(np.array(drawn), np.array(seconds))
                drawn, seconds = [], []
            elif self.drawn % per_ascent == 0:
                self._ascend(np.array(drawn[-per_ascent:]), np.array(seconds[-per_ascent:]))

    def _draw(self) -> Integers:
        self.drawn += 1
        below = self.chances.cumsum(axis=1)
        below /= below[:, -1:]  # rounding must leave nothing above the last device
        return (below <= self.random.random((len(below), 1))).sum(axis=1)

    def _time(self, devices: Integers) -> float:
        step_s = float(flat_step(self.flat, devices[self.unit_of], self.order, self.order[::-1])[0])
        self.first_s = self.first_s or step_s
        over = self._excess_bytes(devices)
        self.least_excess_bytes = min(self.least_excess_bytes, over)
        if over == 0.0 and step_s < self.best_s:
            self.best, self.best_s = devices, step_s
        return step_s + _PENALTY * self.first_s * over / max(1.0, float(self.units.bytes.sum()))

    def _excess_bytes(self, devices: Integers) -> float:
        memory = self.memory
        booked: Floats = np.zeros(len(memory.caps))
        np.add.at(booked, devices, self.units.bytes)
        if memory.counts_transients:
            transient = np.zeros(len(memory.caps))
            np.maximum.at(transient, devices, self.units.transient_bytes)
            booked += transient
        return float(np.maximum(booked - memory.caps, 0.0).sum())

    def _fit(self, drawn: Integers, seconds: Floats) -> None:
        """Set the distribution to the one with the least cross-entropy to the fastest (equation 10)."""
        count = max(1, round(self.settings.elite * len(seconds)))
        fastest = drawn[np.argsort(seconds, kind="stable")[:count]]
        counted = _one_hot(fastest, self.chances.shape[1]).mean(axis=0)
        share = min(1.0, self.settings.uniform)
        self.chances = (1 - share) * counted + share * self.uniform

    def _ascend(self, drawn: Integers, seconds: Floats) -> None:
        mean, spread = float(seconds.mean()), float(seconds.std())
        advantage = (mean - seconds) / (spread if spread > 1e-12 * mean else 1.0)  # equal but for rounding
        before = self.chances
        chosen = _one_hot(drawn, before.shape[1])
        log_before = np.log(np.maximum(before, np.finfo(float).tiny))
        logits = log_before.copy()
        for _ in range(_ASCENTS):
            ratio = np.exp(np.minimum(_total(log_softmax(logits, axis=1) - log_before, drawn), _MOST))
            gain = np.einsum("k,kuj->uj", advantage * ratio, chosen - self.chances) / len(drawn)
            logits += _RATE * (gain - self.divergence_weight * (self.chances - before))
            self.chances = np.where(before > 0, softmax(logits, axis=1), 0.0)
        divergence = float(rel_entr(before, self.chances).sum()) / len(before)
        # Schulman et al., section 4.
        if divergence > 1.5 * _DIVERGENCE:
            self.divergence_weight *= 2
        elif divergence < _DIVERGENCE / 1.5:
            self.divergence_weight = max(_LEAST_WEIGHT, self.divergence_weight / 2)


def _one_hot(drawn: Integers, devices: int) -> Floats:
    """Return (placements, units, devices) 1 where a unit lies, otherwise 0."""
    return (drawn[:, :, None] == np.arange(devices)).astype(float)


def _total(values: Floats, drawn: Integers) -> Floats:
    """Return (placements,) the sum over units of the values where they lie, from (units, devices)."""
    return np.take_along_axis(values[None], drawn[:, :, None], axis=2).sum(axis=(1, 2))
