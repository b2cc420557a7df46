"""Shares of peaks and factors of sources that explain published steps, fitted to runs in parts.

A run's published step is taken to be

    log published = log simulated(shares) + log factor of its source + error,

where a source is a team with its code, whose jobs are tuned well or not. Shares are of products and of the
memory bandwidth by compute capability, of attention by what kernels there were. All are estimated at once by
least squares with priors, so that what few runs say is drawn to what is assumed: a share to the one in
:data:`PRIORS`, a factor to 1. Each source counts as few runs do, however many it has, and errors far off
count less: shares are those of the median source, and jobs that are better tuned are its factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from tensoropt.cluster import ASSUMED
from tensoropt.ops.calls import CostClass
from tests.benchmarks.published.parts import BUBBLE, HOST, RunParts


class Prior(NamedTuple):
    """What is assumed of a share before any run is seen, and the standard deviation of its logarithm."""

    share: float
    deviation: float


ATTENTION_2, ATTENTION_2_HOPPER = "FlashAttention 2", "FlashAttention 2 on H100"
ATTENTION_3 = "newer attention"
PRODUCTS, MEMORY = "products", "memory"
PRIORS = {
    PRODUCTS: Prior(ASSUMED.arithmetic, 0.3),
    MEMORY: Prior(ASSUMED.memory, 0.1),
    # The middle of 50 to 73 % of an A100's peak (FlashAttention-2, arXiv 2307.08691, abstract); 35 % of an
    # H100's, and 1.5 to 2 times as much with FlashAttention-3 (arXiv 2407.08608, abstract).
    ATTENTION_2: Prior(0.61, 0.3),
    ATTENTION_2_HOPPER: Prior(0.35, 0.3),
    ATTENTION_3: Prior(0.61, 0.3),
}
"""The deviations are assumptions."""
NEWER_SINCE = "2025"
"""Runs from then on have FlashAttention-3's or cuDNN's kernels: an assumption, of releases half a year
before."""
LARGEST = {PRODUCTS: 1.0, MEMORY: 0.95}
FACTOR = 0.05
"""The standard deviation of a source's log factor before its runs are seen; those far off count less."""
ERROR = 0.05
"""That of a run beside its source's factor."""
COUNTED = 3
"""A source with more runs counts as so many."""


def attention_of(run: RunParts) -> str:
    """The kind of attention kernels that a run has."""
    if float(run.capability) < 9.0:
        return ATTENTION_2
    newer = not run.date or run.date >= NEWER_SINCE
    return ATTENTION_3 if newer else ATTENTION_2_HOPPER


def shares_of(run: RunParts) -> tuple[str, str, str]:
    """The names of the shares that a run's step depends on: of products, attention and memory."""
    return f"{PRODUCTS} {run.capability}", attention_of(run), f"{MEMORY} {run.capability}"


def _prior(name: str) -> Prior:
    return PRIORS.get(name) or PRIORS[name.rpartition(" ")[0]]


@dataclass(frozen=True)
class Fit:
    """Shares by name, the factor of each source (published over simulated), and what lies between sources.

    Attributes:
        deviation: the standard deviation of the logarithm of published over simulated for a run of a source
            that was not seen.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    deviation: float = 0.0

    def of(self, name: str) -> float:
        """A share; of one that no run was fitted to, what is assumed."""
        return self.shares.get(name, _prior(name).share)

    def factor(self, below: float) -> float:
        """The factor that this share of jobs is below: 0.2 for a well tuned job, 0.5 for the median."""
        return float(np.exp(self.deviation * NormalDist().inv_cdf(below)))


class Runs:
    """Runs in parts as arrays.

    Attributes:
        simulated_at: (n, 3) shares of products, attention and memory that each run was simulated with.
    """

    def __init__(self, runs: Sequence[RunParts]):
        self.runs = runs
        self.simulated_at = np.array([run.simulated_at for run in runs])
        self.published_s = np.array([run.published_s for run in runs])
        self.simulated_s = np.array([run.simulated_s for run in runs])
        self.sources = [run.source for run in runs]
        steps = [(number, step) for number, run in enumerate(runs) for step in run.steps]
        self._run = np.array([number for number, _ in steps], dtype=np.int64)
        self._weight = np.array([step.weight for _, step in steps])
        self._bubble = np.array([step.bubble for _, step in steps])
        self._host_s = np.array([step.host_s for _, step in steps])
        names = dict.fromkeys(name for _, step in steps for name in step.seconds)
        self._seconds = {name: np.array([step.seconds[name] for _, step in steps]) for name in names}
        kernels = [(number, *kernel) for number, (_, step) in enumerate(steps) for kernel in step.kernels]
        self._step = np.array([number for number, *_ in kernels], dtype=np.int64)
        kinds = {CostClass.MATRIX.value: 0, CostClass.ATTENTION.value: 1}
        self._kind = np.array([kinds.get(cls, 3) for _, cls, *_ in kernels], dtype=np.int64)
        self._peak_s = np.array([numbers for _, _, *numbers in kernels])

    @cached_property
    def names(self) -> list[tuple[str, str, str]]:
        """The names of the shares of each run."""
        return [shares_of(run) for run in self.runs]

    def at(self, share_of: Callable[[str], float]) -> np.ndarray:
        """The shares of each run, (n, 3)."""
        return np.array([[share_of(name) for name in names] for names in self.names])

    def seconds(self, shares: np.ndarray, terms: Mapping[str, float] | None = None) -> np.ndarray:
        """The steps of all runs.

        Args:
            shares: (n, 3) of products, attention and memory.
            terms: factors on what is beside operators, by name; 0 leaves a term out.
        """
        terms = terms or {}
        # Behind them what other classes reach: they are rarely bound by arithmetic.
        of_step = np.column_stack([shares, np.full(len(shares), ASSUMED.arithmetic)])[self._run]
        arithmetic, memory, times = self._peak_s.T
        rows = of_step[self._step]
        rate = rows[np.arange(len(rows)), self._kind]
        kernels_s = np.maximum(arithmetic / rate, memory / rows[:, 2]) * times
        step_s = np.bincount(self._step, kernels_s, len(self._run))
        for name, seconds in self._seconds.items():
            step_s = step_s + terms.get(name, 1.0) * seconds
        step_s = step_s * (1.0 + terms.get(BUBBLE, 1.0) * self._bubble)
        step_s = np.maximum(step_s, terms.get(HOST, 1.0) * self._host_s)
        return np.bincount(self._run, self._weight * step_s, len(self.runs))


def _robust(errors: np.ndarray) -> np.ndarray:
    """Errors whose squares grow like the errors themselves where they are large (``soft_l1``)."""
    return np.sign(errors) * np.sqrt(2.0 * (np.sqrt(1.0 + errors**2) - 1.0))


def fit(found: Sequence[RunParts], terms: Mapping[str, float] | None = None) -> Fit:
    """The shares and factors that explain runs best.

    Args:
        terms: as for :meth:`Runs.seconds`.
    """
    runs, sources = Runs(found), list(dict.fromkeys(run.source for run in found))
    names = list(dict.fromkeys(name for names in runs.names for name in names))
    of_source = np.array([sources.index(source) for source in runs.sources])
    counts = np.bincount(of_source, minlength=len(sources))
    weight = np.sqrt(np.minimum(COUNTED / counts, 1.0))[of_source]
    prior = np.array([_prior(name) for name in names])
    logs, deviations = np.log(prior[:, 0]), prior[:, 1]
    most = np.log([LARGEST.get(name.rpartition(" ")[0], 1.0) for name in names])

    def share_of(values: np.ndarray) -> Callable[[str], float]:
        shares = dict(zip(names, np.exp(np.minimum(values[: len(names)], most)).tolist(), strict=True))
        return shares.__getitem__

    def errors(values: np.ndarray) -> np.ndarray:
        factors = values[len(names) :]
        seconds = runs.seconds(runs.at(share_of(values)), terms)
        missed = np.log(seconds / runs.published_s) + factors[of_source]
        return np.concatenate(
            [
                _robust(missed / ERROR) * weight,
                (values[: len(names)] - logs) / deviations,
                _robust(factors / FACTOR),
            ]
        )

    start = np.concatenate([logs, np.zeros(len(sources))])
    scale = np.concatenate([deviations, np.full(len(sources), FACTOR)])
    best = least_squares(errors, start, x_scale=scale, ftol=1e-6, xtol=1e-6).x
    share = share_of(best)
    factors = dict(zip(sources, np.exp(best[len(names) :]).tolist(), strict=True))
    ratios = runs.published_s / runs.seconds(runs.at(share), terms)
    return Fit({name: share(name) for name in names}, factors, deviation_of(runs.sources, ratios))


def deviation_of(sources: Sequence[str], ratios: np.ndarray) -> float:
    """The standard deviation of the logarithm of published over simulated for a run of a source not seen:
    between sources and within them, each source counting as in a fit.

    Args:
        ratios: published over simulated, per run.
    """
    logs, names = np.log(ratios), np.array(sources)
    each = [logs[names == source] for source in dict.fromkeys(sources)]
    weights = np.array([min(len(of), COUNTED) for of in each]) / COUNTED
    between = float(np.average([of.mean() ** 2 for of in each], weights=weights))
    within = float(np.average([of.var() for of in each], weights=weights))
    # The mean of so few sources is itself uncertain.
    return float(np.sqrt(between * (1.0 + 1.0 / weights.sum()) + within))
