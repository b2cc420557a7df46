"""The findings about a strategy, in the one form in which real ranks and fake ones report.

The tolerances say how far a plan's results may be from the unsplit model's, and distinguish rounding from a
fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensoropt.verify.recorder import all_sent

LOSS_TOLERANCE = 1e-5
"""The relative tolerance of the loss. A mean loss sums thousands of float32 terms in another order: a few
units of 6e-8 each, growing with the square root of their number and with depth."""
GRADIENT_TOLERANCE = 1e-3
"""The tolerance relative to each parameter's largest gradient, but to no less than 1e-3 of the model's
largest. Measured: below 1e-6 for ordinary parameters, 2e-4 for a convolution's bias before a batch norm,
whose true gradient is zero. Wrong placements are off by per cents (10 to 164 % in those tried)."""
_PARAMETER_TOLERANCE = 1e-4
"""The tolerance after two optimizer steps, relative to each parameter's largest value. Measured: up to 2e-5,
for biases that start at zero."""
_TOLERANCE_FACTOR = {"float64": 1e-6, "float32": 1.0, "float16": 2e3, "bfloat16": 2e4}
"""Factors of the tolerances, by the lowest precision in which anything in the model is computed: about the
ratio of unit roundoffs, less strict in float64, where sums of thousands of terms and eps constants weigh
more."""
_SHRUNK = 1e-6
"""The largest share of a single-precision difference that may remain in double precision if it is rounding:
of roundoff 2e-9 remains, of a fault everything. Measured where two steps through batch norms over 4 samples
amplify rounding (MobileNetV2 on 32x32 images): parameters off by 2e-10 in float64, gradients by 7e-13."""
MODULE_SHRUNK = 1e-2
"""The same share between a graph and the module that it was captured from, which may keep its own casts to
float32: a fault remains as it is."""
_DISTANCE_FACTOR = 10.0
"""The largest ratio, in norm, of a split model's distance from the exact gradients to the unsplit model's in
the same precision. Measured: 0.9 to 1.1 times if rounding crosses no kink (an MLP and a transformer in
bfloat16, a VGG with batch norms in float32)."""
KINKED_DISTANCE = {"float32": 5e-2, "float16": 2e-1, "bfloat16": 4e-1}
"""The distance that crossed kinks may add to that, relative to the gradients' norm. Measured: 1.3e-2 for a
ResNet with 2x2 images in float32, 0.22 for a small VGG with batch norms in bfloat16. A smaller fault that
occurs only in a narrow type cannot be distinguished from them; in a model without kinks it can."""
NARROW_FACTOR, _NARROW_TOLERANCE = 3.0, 2e-3
"""The tolerance under mixed precision: a multiple of the model's own rounding (unsplit, against unsplit in
float32), plus half a unit of bfloat16's last place. Partial sums are rounded once more than whole ones, so a
split model is off by about as much as the narrow type is at all. In a model that rounding throws far off (a
batch norm over few samples) this shows little: verify it in float32, where the same rules are held to
1e-3."""


_REPLICA_TOLERANCE = 1e-5
"""The tolerance between replicas on devices whose kernels sum in no fixed order (CUDA's scatters and some
convolutions), relative to their largest value, in float32. An assumption that has not been tried on a GPU: a
sum of thousands of terms in another order is off by some units of 6e-8, a replica that missed a reduction by
per cents."""


@dataclass(frozen=True)
class Differences:
    """The relative distances of results from what they should be, by kind; None for a kind that was not
    compared.

    A difference is inf if a value is NaN or infinite and the one it is compared with is not.

    Attributes:
        loss: the loss's difference; in inference that of the outputs.
        gradient: the difference of the parameter whose gradient is furthest off.
        parameter: the difference of parameters after some optimizer steps.
        buffer: the difference of buffers after these steps.
    """

    loss: float | None = None
    gradient: float | None = None
    parameter: float | None = None
    buffer: float | None = None

    @classmethod
    def infinite(cls) -> Differences:
        """Make the differences of a strategy that could not be run."""
        return cls(math.inf, math.inf, math.inf, math.inf)

    @property
    def by_kind(self) -> dict[str, float | None]:
        """The differences of all kinds."""
        return {kind: getattr(self, kind) for kind in _TOLERANCES}

    @property
    def compared(self) -> dict[str, float]:
        """The differences of the kinds that were compared."""
        return {kind: value for kind, value in self.by_kind.items() if value is not None}

    @property
    def finite(self) -> bool:
        """Whether none of them is NaN or infinite."""
        return all(map(math.isfinite, self.compared.values()))


_TOLERANCES = {
    "loss": LOSS_TOLERANCE,
    "gradient": GRADIENT_TOLERANCE,
    "parameter": _PARAMETER_TOLERANCE,
    "buffer": _PARAMETER_TOLERANCE,
}


def within_tolerance(
    differences: Differences, precision: str = "float32", rounding: Differences | None = None
) -> bool:
    """Return whether the differences are explained by rounding (NaN is not); one that was not taken is
    ignored.

    Args:
        precision: the lowest one that anything in the model is computed in.
        rounding: under mixed precision, what the narrower type alone changes in this model.
    """
    if rounding is not None:
        allowed = {k: _NARROW_TOLERANCE + NARROW_FACTOR * r for k, r in rounding.compared.items()}
    else:
        allowed = {kind: limit * _TOLERANCE_FACTOR[precision] for kind, limit in _TOLERANCES.items()}
    return all(value <= allowed[kind] for kind, value in differences.compared.items())


def is_rounding(single: Differences, double: Differences) -> bool:
    """Return whether differences taken in both precisions are explained by rounding."""
    shrunk = {}
    for kind, narrow in single.compared.items():
        # NaN is within no tolerance: a kind that was compared once only counts as a fault.
        wide = double.compared.get(kind, math.nan)
        shrunk[kind] = 0.0 if math.isfinite(narrow) and wide <= _SHRUNK * narrow else wide
    return within_tolerance(Differences(**shrunk), "float64")


@dataclass(frozen=True)
class NarrowDistance:
    """The distance of gradients (in inference: outputs) in the model's own precision from those in double
    precision.

    Attributes:
        split: the norm of the difference over everything on this rank, relative to that of the expected
            values.
        unsplit: the same for the unsplit model in its own precision: what rounding alone does.
        kinked: whether rounding may change whole elements (:func:`tensoropt.verify.reference.has_kinks`).
    """

    split: float
    unsplit: float
    kinked: bool


def near_enough(distance: NarrowDistance, precision: str) -> bool:
    """Return whether a rank's gradients in the model's own precision are as near the exact ones as they
    should be.

    Double precision shows that placements are right, but not that what is cast or summed in a narrow type is
    right.

    Args:
        precision: the model's own precision.
    """
    allowed = _DISTANCE_FACTOR * distance.unsplit
    if distance.kinked:
        allowed = max(allowed, KINKED_DISTANCE.get(precision, 0.0))
    return distance.split <= allowed


def replicas_near(spread: float | None, precision: str) -> bool:
    """Return whether replicas whose bits differ are as near to each other as kernels without a fixed order
    keep them.

    Args:
        spread: how far they are apart; None if kernels have a fixed order, so that bits decide.
        precision: the lowest one that anything in the model is computed in.
    """
    return spread is not None and spread <= _REPLICA_TOLERANCE * _TOLERANCE_FACTOR[precision]


def replicas_agree(ranks: Sequence[Mapping[str, tuple[tuple[int, ...], str]]]) -> bool:
    """Return whether ranks that hold the same shard hold the same bits.

    Args:
        ranks: for each rank and parameter, which shard it has, and a digest of it.
    """
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
    """The results of running a strategy; None stands for what was not checked.

    Attributes:
        differences: the differences from the unsplit model.
        worst_gradient, worst_parameter: the names of the largest difference of each kind; "" if there is
            none.
        not_finite: how many values of the unsplit model itself are NaN or infinite, by what they belong to.
        replicas_agree: whether ranks with the same shard have the same bits, or on GPUs nearly the same
            values.
        replica_difference: how far they are apart, relative; None if bits differ and decide.
        unsplit_on: the device that the unsplit model ran on.
        numerics_ok: whether differences are rounding and replicas agree.
        compared_in: the precision in which ``differences`` were taken.
        narrow: the differences in the model's own precision, if the decision took double precision.
        collectives_of_ranks: of each rank that was checked, as :func:`tensoropt.verify.recorder.summarise`
            writes them.
        ranks_checked: the numbers of the ranks that were checked.
        ranks_unlike: where ranks do not issue the same (:func:`tensoropt.verify.agreement.disagreements`).
        memory_tracked: bytes of the fullest rank by purpose, and their ``peak``; on GPUs also the allocator's
            own peaks, ``allocated`` and ``reserved``.
        memory_tracked_of_ranks: the peaks of the ranks whose memory was tracked.
        time_measured_s: the median step of the slowest rank.
        error: why the strategy could not be run, or that it is right only in double precision.
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
        """Make the findings of a strategy that could not be run."""
        return cls(
            Differences.infinite(),
            worst_gradient="",
            worst_parameter="",
            replicas_agree=False,
            numerics_ok=False,
            time_measured_s=math.inf,
            error=error,
        )

    @property
    def collectives_issued(self) -> list[dict[str, Any]]:
        """The collectives and messages of all ranks together."""
        return all_sent(self.collectives_of_ranks)

    @property
    def memory_tracked_bytes(self) -> int:
        """The peak of the fullest rank."""
        return self.memory_tracked.get("peak", 0)
