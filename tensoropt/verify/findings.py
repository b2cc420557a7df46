"""The results of checking a strategy, and the tolerances that tell rounding errors from faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensoropt.verify.recorder import all_sent

_LOSS_TOLERANCE = 1e-5
"""Relative tolerance of the loss. Rounding changes a float32 term by about 6e-8, and a sum by more, in
proportion to the square root of the number of terms."""
_GRADIENT_TOLERANCE = 1e-3
"""Tolerance relative to each parameter's largest gradient, or to 1e-3 of the model's largest if that is more.

Measured: below 1e-6, or 2e-4 for a bias before a batch norm. Wrong placements are off by 10 to 164 %.
"""
_PARAMETER_TOLERANCE = 1e-4
"""Tolerance after two optimizer steps, relative to each parameter's largest value. Measured: up to 2e-5."""
_TOLERANCE_FACTOR = {"float64": 1e-6, "float32": 1.0, "float16": 2e3, "bfloat16": 2e4}
"""Factors of all tolerances, by the lowest precision in the model: about the ratio of unit roundoffs."""
_SHRUNK = 1e-6
"""The largest ratio of a difference in float64 to the same difference in float32 that counts as rounding.

Rounding shrinks to about 2e-9, a fault not at all. Measured with batch norms over 4 samples: 2e-10 for all
results, 7e-13 for gradients.
"""
MODULE_SHRUNK = 1e-2
"""The same ratio for a graph and its module, larger because the module's own casts to float32 remain."""
_DISTANCE_FACTOR = 10.0
"""The largest ratio of a plan's distance from exact gradients to the unsplit model's; 0.9 to 1.1 measured."""
_KINKED_DISTANCE = {"float32": 5e-2, "float16": 2e-1, "bfloat16": 4e-1}
"""The allowed distance from exact gradients, relative to their norm, in models with kinks (as ReLU at 0).

Measured: 1.3e-2 for a ResNet with 2x2 images in float32, 0.22 for a small VGG in bfloat16.
"""
_NARROW_FACTOR, _NARROW_TOLERANCE = 3.0, 2e-3
"""The tolerance under mixed precision: factor × the unsplit model's rounding + half of bfloat16's last bit.

The factor is above 1, as partial sums are rounded once more. Verify models that amplify rounding in float32.
"""


_REPLICA_TOLERANCE = 1e-5
"""Tolerance between replicas on CUDA, whose kernels sum in no fixed order; an untested assumption."""


@dataclass(frozen=True)
class Differences:
    """Relative differences by kind; None if not compared, infinite if only one side is NaN or infinite.

    Attributes:
        loss: the difference of the loss, or of the outputs in inference.
        gradient: the largest difference of any parameter's gradient.
        parameter: the largest difference of any parameter after some optimizer steps.
        buffer: the largest difference of any buffer after these steps.
    """

    loss: float | None = None
    gradient: float | None = None
    parameter: float | None = None
    buffer: float | None = None

    @property
    def by_kind(self) -> dict[str, float | None]:
        return {kind: getattr(self, kind) for kind in _TOLERANCES}

    @property
    def compared(self) -> dict[str, float]:
        return {kind: value for kind, value in self.by_kind.items() if value is not None}

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.compared.values()))


_TOLERANCES = {
    "loss": _LOSS_TOLERANCE,
    "gradient": _GRADIENT_TOLERANCE,
    "parameter": _PARAMETER_TOLERANCE,
    "buffer": _PARAMETER_TOLERANCE,
}


def within_tolerance(
    differences: Differences, precision: str = "float32", rounding: Differences | None = None
) -> bool:
    """Return whether all differences that were compared are within the tolerances; NaN never is.

    Args:
        precision: the lowest precision in the model.
        rounding: under mixed precision, the differences that rounding makes in the unsplit model.
    """
    if rounding is not None:
        allowed = {k: _NARROW_TOLERANCE + _NARROW_FACTOR * r for k, r in rounding.compared.items()}
    else:
        allowed = {kind: limit * _TOLERANCE_FACTOR[precision] for kind, limit in _TOLERANCES.items()}
    return all(value <= allowed[kind] for kind, value in differences.compared.items())


def is_rounding(single: Differences, double: Differences) -> bool:
    """Return whether differences are rounding: 1e6 times smaller in float64, or tolerated in float64."""
    shrunk = {}
    for kind, narrow in single.compared.items():
        # NaN is within no tolerance: a kind that was compared in one precision only counts as a fault.
        wide = double.compared.get(kind, math.nan)
        shrunk[kind] = 0.0 if math.isfinite(narrow) and wide <= _SHRUNK * narrow else wide
    return within_tolerance(Differences(**shrunk), "float64")


@dataclass(frozen=True)
class NarrowDistance:
    """The relative distances of gradients (or outputs) in the model's precision from those in float64.

    Attributes:
        split: the norm of the plan's difference on this rank over the norm of the values in float64.
        unsplit: the norm of the unsplit model's difference over that norm.
        kinked: whether the model has kinks (:func:`tensoropt.verify.reference.has_kinks`).
    """

    split: float
    unsplit: float
    kinked: bool


def near_enough(distance: NarrowDistance, precision: str) -> bool:
    """Return whether a plan's gradients are at most 10 times as far from float64 as the unsplit model's.

    If the model has kinks, a fixed distance (:data:`_KINKED_DISTANCE`) is also allowed.
    """
    allowed = _DISTANCE_FACTOR * distance.unsplit
    if distance.kinked:
        allowed = max(allowed, _KINKED_DISTANCE.get(precision, 0.0))
    return distance.split <= allowed


def replicas_near(spread: float | None, precision: str) -> bool:
    """Return whether the difference between replicas of parameters is within the tolerance.

    Args:
        spread: the largest relative difference; None if kernels sum in a fixed order, so bits must agree.
        precision: the lowest precision in the model.
    """
    return spread is not None and spread <= _REPLICA_TOLERANCE * _TOLERANCE_FACTOR[precision]


def replicas_agree(ranks: Sequence[Mapping[str, tuple[tuple[int, ...], str]]]) -> bool:
    """Return whether replicas have equal bits, given (shard index, digest) by parameter for each rank."""
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        digests: dict[tuple[int, ...], str] = {}
        for rank in ranks:
            if name not in rank:  # of a placed plan each rank has its own
                continue
            shard, digest = rank[name]
            if digests.setdefault(tuple(shard), digest) != digest:
                return False
    return True


@dataclass(frozen=True)
class RunFindings:
    """The results of running a strategy; None for what was not checked.

    Attributes:
        worst_gradient, worst_parameter: the names of the parameters that differ most.
        not_finite: the number of NaN and infinite values of the unsplit model's results, by name.
        replicas_agree: whether replicas have the same bits, or on GPUs nearly the same values.
        replica_difference: the largest relative difference between replicas; None if their bits must agree.
        unsplit_on: the unsplit model's device.
        numerics_ok: whether differences are rounding and replicas agree.
        compared_in: the precision of ``differences``.
        narrow: the differences in the model's own precision, if double precision decided.
        collectives_of_ranks: each checked rank's collectives (:func:`tensoropt.verify.recorder.summarise`).
        ranks_unlike: the orders that differ (:func:`tensoropt.verify.agreement.disagreements`).
        memory_tracked: the sizes from :func:`~.fake_ranks.tracked_memory` on the rank with the highest peak.
        memory_tracked_of_ranks: each checked rank's peak memory in bytes.
        time_measured_s: the median over steps of the slowest rank's time.
        error: why the strategy could not run, or that it is correct in double precision only.
    """

    differences: Differences = field(default_factory=Differences)
    worst_gradient: str | None = None
    worst_parameter: str | None = None
    not_finite: Mapping[str, int] = field(default_factory=dict)
    replicas_agree: bool | None = None
    replica_difference: float | None = None
    unsplit_on: str | None = None
    numerics_ok: bool | None = None
    compared_in: str | None = None
    narrow: Differences | None = None
    collectives_of_ranks: list[list[dict[str, Any]]] = field(default_factory=list)
    ranks_checked: list[int] = field(default_factory=list)
    ranks_unlike: list[str] = field(default_factory=list)
    memory_tracked: Mapping[str, int] = field(default_factory=dict)
    memory_tracked_of_ranks: list[int] = field(default_factory=list)
    time_measured_s: float | None = None
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> RunFindings:
        return cls(
            Differences(math.inf, math.inf, math.inf, math.inf),
            worst_gradient="",
            worst_parameter="",
            replicas_agree=False,
            numerics_ok=False,
            time_measured_s=math.inf,
            error=error,
        )

    @property
    def collectives_issued(self) -> list[dict[str, Any]]:
        """The messages of all ranks and the collectives of the first, one row per distinct one."""
        return all_sent(self.collectives_of_ranks)

    @property
    def memory_tracked_bytes(self) -> int:
        return self.memory_tracked.get("peak", 0)
