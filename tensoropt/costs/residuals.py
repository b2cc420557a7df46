"""What real steps of this machine showed about its prices: a factor or some seconds for each kind of work.

Operators, edges and links are timed one by one. In a step they follow each other: caches are warm with other
data, code is cold, ranks wait for the slower one. What that adds is the same for all operators of a class and
all collectives of a kind, so a dozen figures say it. :mod:`tensoropt.calibration` fits them to short real
steps; here they are applied to prices, so that the search, the simulator and every planner count the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tensoropt.costs.compute import class_of
from tensoropt.costs.prices import ComputeCosts
from tensoropt.ops.calls import CostClass
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.reshard.steps import COLLECTIVES
from tensoropt.types import MEASURED

BYTE, COLLECTIVE, EDGES, COPIES, GRADIENTS, OPTIMIZER = (
    "each byte", "each collective", "edges", "copies", "gradients", "optimizer",
)  # fmt: skip
SECONDS = (BYTE, COLLECTIVE)
"""The terms that are seconds per issue or byte, 0 where nothing is known; others are factors, 1 where nothing
is."""


def factor_of_class(cls: str) -> str:
    """Return the name of the factor on the seconds of operators of a class."""
    return f"class {cls}"


def factor_of_kind(kind: str) -> str:
    """Return the name of the factor on the seconds of collectives of a kind."""
    return f"kind {kind}"


TERMS: tuple[str, ...] = (
    *(factor_of_class(cls.value) for cls in CostClass),
    *map(factor_of_kind, COLLECTIVES),
    EDGES,
    COPIES,
    GRADIENTS,
    OPTIMIZER,
    *SECONDS,
)
"""All terms: factors on the seconds of operators by class, of collectives by kind, of issuing edges, of local
copies, of adding gradients up and of the optimizer's step; and seconds for each byte that an operator reads
or writes, which others have displaced from caches since, and for each collective, for which ranks wait."""

FAMILIES: tuple[frozenset[str], ...] = (
    frozenset(factor_of_class(cls.value) for cls in CostClass),
    frozenset(map(factor_of_kind, COLLECTIVES)),
)
"""Factors that deviate in common: of operators, and of collectives."""


def touched_bytes(facts: Facts) -> tuple[float, float]:
    """Return the bytes that a workload reads and writes in (forward, backward): twice as many in backward, as
    a roofline has it (:mod:`tensoropt.costs.compute`)."""
    return float(facts.traffic_bytes), 2.0 * facts.traffic_bytes


def neutral(term: str) -> float:
    """Return the value of a term that changes nothing."""
    return 0.0 if term in SECONDS else 1.0


@dataclass(frozen=True)
class Residuals:
    """The terms of one machine, and how far predictions with them are off.

    Attributes:
        terms: values by name (:data:`TERMS`); what is missing changes nothing.
        low, high: measured over predicted seconds of steps of plans and models that the terms were not fitted
            to: the bounds of ``holds`` of them.
        holds: the share of steps that lie between these bounds.
        steps: plans that were run.
        disturbed: how many of them ran while other programs used the machine.
        models: the models they were of.
        error, raw_error: median of the relative error of such predictions, with the terms and without.
        worst: 90th percentile of the error with the terms.
        works: (forward, backward) seconds of workloads that were timed in steps, by key, instead of those
            they were timed with by themselves.
        free_if_unknown: whether work that was never timed takes no time, so that plans with it are tried
            (FastT, section 4).
    """

    terms: Mapping[str, float] = field(default_factory=dict)
    low: float = 1.0
    high: float = 1.0
    holds: float = 0.8
    steps: int = 0
    disturbed: int = 0
    models: tuple[str, ...] = ()
    error: float = 0.0
    raw_error: float = 0.0
    worst: float = 0.0
    works: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    free_if_unknown: bool = False

    def of(self, term: str) -> float:
        """Return the value of a term."""
        return self.terms.get(term, neutral(term))

    def __bool__(self) -> bool:
        return bool(self.terms or self.works or self.free_if_unknown)

    @property
    def words(self) -> str:
        """A note on what predictions rest on."""
        return (
            f"times are calibrated on this machine: {self.steps} plans of {len(self.models)} models were "
            f"run; of models it was not fitted to, half are predicted within {self.error:.1%} "
            f"({self.raw_error:.1%} without)"
            + (
                f"; {self.disturbed} of the plans ran while other programs used the machine, so run "
                "tensoropt calibrate once more while it is idle"
                if self.disturbed
                else ""
            )
        )

    def to_report(self) -> dict[str, Any]:
        """Return what an exploration says of the calibration that it counts with, as plain data."""
        return {
            "low": self.low,
            "high": self.high,
            "holds": self.holds,
            "plans": self.steps,
            "models": list(self.models),
            "error": self.error,
            "error_90th": self.worst,
            "raw_error": self.raw_error,
            "words": self.words,
        }

    def compute(self, costs: ComputeCosts) -> ComputeCosts:
        """Return the seconds of workloads in a step."""
        return _InStep(costs, self) if self else costs

    def overheads(self, overheads: Overheads) -> Overheads:
        """Return the overheads in a step."""
        edges, copies, gradients = (self.of(term) for term in (EDGES, COPIES, GRADIENTS))
        return replace(
            overheads,
            copy_s_per_byte=overheads.copy_s_per_byte * copies,
            add_s_per_byte=overheads.add_s_per_byte * gradients,
            call_s=overheads.call_s * edges,
            again_s=overheads.again_s * edges,
            pass_s=overheads.pass_s * edges,
            arrive_s=overheads.arrive_s * gradients,
            accumulate_s=overheads.accumulate_s * gradients,
            step_kinds_s={kind: s * edges for kind, s in overheads.step_kinds_s.items()},
            step_s=overheads.step_s * self.of(OPTIMIZER),
        )

    def links(self, fits: LinkFits | None) -> LinkFits | None:
        """Return the fits of a mesh's links in a step: collectives by their kind, messages as they are."""
        if fits is None or not self:
            return fits
        more_s = self.of(COLLECTIVE)
        collectives = {
            (kind, axes): tuple(fit.slowed(self.of(factor_of_kind(kind)), more_s) for fit in of_groups)
            for (kind, axes), of_groups in fits.collectives.items()
        }
        return replace(fits, collectives=collectives)


@dataclass(frozen=True)
class _InStep:
    """Costs of workloads with the residuals of their classes."""

    costs: ComputeCosts
    residuals: Residuals

    @property
    def source(self) -> str:
        return self.costs.source

    @property
    def optimizer_s_per_element(self) -> float:
        return self.costs.optimizer_s_per_element * self.residuals.of(OPTIMIZER)

    def _factor(self, work: Workload) -> float:
        return self.residuals.of(factor_of_class(class_of(work)))

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        if work.key in self.residuals.works:
            return self.residuals.works[work.key]
        if self.residuals.free_if_unknown and self.costs.source_of(work) != MEASURED:
            return 0.0, 0.0
        factor = self._factor(work)
        forward_s, backward_s = self.costs.seconds(work, facts)
        if not (each_s := self.residuals.of(BYTE)):
            return forward_s * factor, backward_s * factor
        there, back = touched_bytes(facts)
        # What takes no time (views alone) is not executed.
        return (
            forward_s * factor + each_s * there * (forward_s > 0),
            backward_s * factor + each_s * back * (backward_s > 0),
        )

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        return self.costs.host_seconds(work)

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        return self.costs.weight_gradient_s(work, facts) * self._factor(work)

    def source_of(self, work: Workload) -> str:
        return self.costs.source_of(work)


NO_RESIDUALS = Residuals()
"""Prices as they were measured, one by one."""

_KIND = "calibration"
_STEP = "step"
_TERMS = "residuals-2"
"""The key of terms, a new one when there are others: a fit without one of them is another fit."""
_KEPT = 5
"""Runs of a workload in steps of which the smallest counts: old ones are of another code."""


def save_residuals(store: ProfileStore, prefix: str, residuals: Residuals) -> None:
    """Keep the residuals of the hardware that ``prefix`` names, without the workloads' own seconds."""
    store.put(f"{prefix}/{_TERMS}", asdict(replace(residuals, works={})), kind=_KIND)


def load_residuals(store: ProfileStore, prefix: str) -> Residuals:
    """Return what real steps on the hardware that ``prefix`` names have shown; :data:`NO_RESIDUALS` if none
    were run."""
    record = store.get(f"{prefix}/{_TERMS}", kind=_KIND)
    known = NO_RESIDUALS if record is None else Residuals(**{**record, "models": tuple(record["models"])})
    head = f"{prefix}/{_STEP}/"
    works = {
        key.removeprefix(head): (min(of["forward_s"]), min(of["backward_s"]))
        for key, of in store.items(_KIND, head)
    }
    return replace(known, works=works) if works else known


def save_works(store: ProfileStore, prefix: str, works: Mapping[str, tuple[float, float]]) -> None:
    """Keep the seconds of workloads in a step, beside those of the last steps.

    Args:
        works: (forward, backward) seconds by key.
    """
    keys = {f"{prefix}/{_STEP}/{key}": seconds for key, seconds in works.items()}
    known = store.get_many(keys, kind=_KIND)
    records = {}
    for key, (forward_s, backward_s) in keys.items():
        of = known.get(key, {"forward_s": [], "backward_s": []})
        records[key] = {
            "forward_s": [*of["forward_s"], forward_s][-_KEPT:],
            "backward_s": [*of["backward_s"], backward_s][-_KEPT:],
        }
    store.put_many(records, kind=_KIND)
