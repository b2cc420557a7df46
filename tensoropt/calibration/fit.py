"""The fit of residual terms to real steps, and how well it predicts steps of models that it has not seen.

A predicted time is close to linear in the terms, so each is described by its derivatives, found by changing
one term after another and pricing the same strategy again. The fit minimises relative errors, robustly (a
step that another program disturbed counts little), and holds each term near "nothing changes" unless steps
say otherwise: with a dozen terms and a few dozen steps that is what keeps it from following noise. Classes of
operators deviate in common, as do kinds of collectives: what a step adds (cold caches, waiting) it adds to
all. So each is held near the mean of its family, which also stands for those that no run had.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from tensoropt.cluster.local import BUSY
from tensoropt.costs.residuals import (
    BYTE,
    COLLECTIVE,
    COPIES,
    FAMILIES,
    GRADIENTS,
    SECONDS,
    Residuals,
    neutral,
)
from tensoropt.types import Floats

_USUAL = 0.25
"""The usual deviation of a factor from 1; an assumption. Copies and gradients were timed on memory of which
another part lies in caches than in a step."""
_USUAL_FACTOR = {COPIES: 0.5, GRADIENTS: 0.5}
_USUAL_IN_FAMILY = 0.1
"""The usual deviation of a factor from the mean of its family; an assumption."""
_USUAL_S = {BYTE: 1e-10, COLLECTIVE: 2e-4}
"""The usual seconds of the other terms; assumptions: of a byte's way from memory instead of a cache, and of
the size of an edge's own seconds on CPU ranks."""
_NOISE = 0.05
"""Relative errors of steps beyond which they count less than by their square; an assumption."""
_BOUNDS = (0.25, 4.0)
_MOST_S = {BYTE: 1e-8}
"""The most seconds of a term; 5 ms for those per issue."""
HOLDS = 0.8
"""The share of steps that the interval of a prediction holds."""


@dataclass(frozen=True)
class Equation:
    """One measured sum of seconds of a step, and its prediction as a function of the terms.

    Attributes:
        predicted_s: with terms that change nothing.
        by: derivatives by term: seconds by which a factor of 2 instead of 1 changes it, or by which each
            second of the others does.
        weight: of its relative error.
    """

    measured_s: float
    predicted_s: float
    by: Mapping[str, float]
    weight: float = 1.0

    def at(self, terms: Mapping[str, float]) -> float:
        """Return the prediction with some terms."""
        changes = (d * (terms.get(t, neutral(t)) - neutral(t)) for t, d in self.by.items())
        return max(self.predicted_s + sum(changes), 1e-9)


@dataclass(frozen=True)
class Run:
    """One plan that was run.

    Attributes:
        model: the model's source, with its settings.
        step: of the whole step.
        parts: of what it consists of: computation by class, collectives.
        network: of all of its collectives.
        cores_busy: the cores that other programs had in use around it.
    """

    model: str
    step: Equation
    network: Equation | None
    parts: tuple[Equation, ...]
    cores_busy: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other programs used the machine, so that its collectives waited for their turns."""
        return self.cores_busy >= BUSY

    def to_record(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_record` reads back."""
        return asdict(self)

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Run:
        """Return the run that :meth:`to_record` wrote."""
        network = data["network"]
        return cls(
            data["model"],
            Equation(**data["step"]),
            None if network is None else Equation(**network),
            tuple(Equation(**part) for part in data["parts"]),
            data["cores_busy"],
        )

    def equations(self) -> Iterable[Equation]:
        """Return all of its sums."""
        return (self.step, *((self.network,) if self.network else ()), *self.parts)


def fit_terms(
    runs: Sequence[Run],
    start: Mapping[str, float] | None = None,
    tightness: float = 1.0,
) -> dict[str, float]:
    """Return the terms that describe runs best, of those that any of them depends on, and the others of their
    families (:data:`~tensoropt.costs.residuals.FAMILIES`) at the family's mean.

    Args:
        start: what terms are held near; by default families near their means, which are found with them, and
            others near what changes nothing.
        tightness: how strongly, as a multiple of the usual.
    """
    equations = [one for run in runs for one in run.equations()]
    terms = sorted({term for one in equations for term, value in one.by.items() if value})
    if not terms:
        return {}
    families = [] if start else [of for of in FAMILIES if not of.isdisjoint(terms)]
    family_of = {term: len(terms) + i for i, of in enumerate(families) for term in of}
    usual_of = _USUAL_FACTOR | _USUAL_S | dict.fromkeys(family_of, _USUAL_IN_FAMILY)
    begin = np.array([(start or {}).get(term, neutral(term)) for term in terms] + [1.0] * len(families))
    usual = np.array([usual_of.get(t, _USUAL) for t in terms] + [_USUAL] * len(families)) / tightness
    low = np.array([0.0 if term in SECONDS else _BOUNDS[0] for term in terms] + [_BOUNDS[0]] * len(families))
    high = np.array(
        [_MOST_S.get(term, 5e-3) if term in SECONDS else _BOUNDS[1] for term in terms]
        + [_BOUNDS[1]] * len(families)
    )
    # Where the value that a term is held near stands: with the family's, or with what it begins at.
    near = np.array([family_of.get(term, -1) for term in terms] + [-1] * len(families))
    measured = np.array([one.measured_s for one in equations])
    weights = np.array([one.weight for one in equations])
    design = np.array([[one.by.get(term, 0.0) for term in terms] for one in equations])
    constant = np.array([one.predicted_s for one in equations]) - design @ np.array(list(map(neutral, terms)))

    def errors(values: Floats) -> Floats:
        predicted = np.maximum(constant + design @ values[: len(terms)], 1e-9)
        # Soft beyond the noise: sqrt of the pseudo-Huber loss, so that only steps are treated robustly.
        relative = weights * np.log(predicted / measured) / _NOISE
        soft = np.sign(relative) * np.sqrt(2.0 * (np.sqrt(1.0 + relative**2) - 1.0))
        return np.concatenate([soft, (values - np.where(near < 0, begin, values[near])) / usual])

    # In units of what is usual, as factors and seconds differ by orders of magnitude.
    found = least_squares(errors, np.clip(begin, low, high), bounds=(low, high), x_scale=usual)
    means = {term: float(found.x[place]) for term, place in family_of.items()}
    return means | {term: float(value) for term, value in zip(terms, found.x[: len(terms)], strict=True)}


def fit_residuals(runs: Sequence[Run]) -> Residuals:
    """Return the residuals of a machine with the errors of predictions for models that were left out of the
    fit, one after another.

    Runs that other programs disturbed are left out where the others are at least as many.
    """
    quiet = [run for run in runs if not run.disturbed]
    disturbed = 0 if 2 * len(quiet) >= len(runs) else len(runs) - len(quiet)
    runs = runs if disturbed else quiet
    models = tuple(dict.fromkeys(run.model for run in runs))
    ratios, errors, raw = [], [], []
    for left_out in models:
        others = [run for run in runs if run.model != left_out]
        terms = fit_terms(others) if others else {}
        for run in runs:
            if run.model == left_out:
                predicted_s = run.step.at(terms)
                errors.append(abs(predicted_s / run.step.measured_s - 1))
                raw.append(abs(run.step.predicted_s / run.step.measured_s - 1))
                ratios.append(run.step.measured_s / predicted_s)
    low, high = np.quantile(ratios, [(1 - HOLDS) / 2, (1 + HOLDS) / 2])
    return Residuals(
        terms=fit_terms(runs),
        low=float(low),
        high=float(high),
        holds=HOLDS,
        steps=len(runs),
        disturbed=disturbed,
        models=models,
        error=statistics.median(errors),
        raw_error=statistics.median(raw),
        worst=float(np.quantile(errors, 0.9)),
    )
