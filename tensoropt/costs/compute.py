"""Durations of operators on a rank: ``measured`` here, ``fitted`` to timings, or from the ``data sheet``."""

from __future__ import annotations

import itertools
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from tensoropt.cluster import ASSUMED, DeviceKind, host_seconds, reached_by
from tensoropt.cluster.local import processor_name
from tensoropt.errors import MeasurementError
from tensoropt.ops.calls import CostClass, LocalCall
from tensoropt.ops.registry import cost_class_of, launches
from tensoropt.profiling.facts import CallWork, Facts
from tensoropt.profiling.optimizers import kind_of
from tensoropt.profiling.workload import Workload
from tensoropt.profiling.workload_timing import OUT_OF_MEMORY
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.types import DATA_SHEET, FITTED, MEASURED, SOURCES

_LAUNCH_S = 5e-6
"""The duration of a kernel launch on a CPU rank; an assumption. ``presets/host.yaml`` has that of GPUs."""

MOST_SAMPLES = 20_000
"""The most records of the store that a fit uses; reading a million took half a minute."""
_FEWEST_SAMPLES = 8
"""The fewest samples of one class and direction for a fit; an assumption."""
_SAMPLES_PER_KNOT = 6  # an assumption
# An assumption: leaving out a fifth at a time leaves enough to fit, and costs five fits.
_FOLDS = 5
_DIRECTIONS = ("forward", "backward")


def class_of(work: Workload) -> str:
    """Return a workload's cost class, such as ``matrix product``: that of its first call that has one."""
    classes = (_own_class(call) for call, _ in work.calls)
    return next(filter(None, classes), CostClass.ELEMENT_WISE).value


def _own_class(call: LocalCall) -> CostClass | None:
    # The kernel "divided" wraps another call, whose class determines how fast it runs.
    return cost_class_of(str(call.static[0] if call.function == "kernels.divided" else call.function))


def _call_class(call: LocalCall) -> CostClass:
    return _own_class(call) or CostClass.ELEMENT_WISE


def _kernels_of(work: Workload) -> int:
    return sum(1 for call, _ in work.calls if launches(call.function))


def number_format(dtype: str, cls: CostClass, device_type: str, kernels: KernelSettings) -> str:
    """Return the number format in which a cost class computes: ``dtype``, or ``tf32`` where it is allowed."""
    setting = _TF32_BY.get(cls)
    may = device_type == "cuda" and dtype == "float32" and setting is not None
    return "tf32" if may and getattr(kernels, str(setting)) == "tf32" else dtype


def peak_flops(device: DeviceKind, kernels: KernelSettings, dtype: str, cls: CostClass) -> float:
    """Return a device's peak FLOP/s for a cost class, in the number format in which it computes."""
    name = number_format(dtype, cls, device.type, kernels)
    return device.flops_of(name if name in device.flops else dtype)


def ideal_s(device: DeviceKind, dtype: str, facts: Facts) -> tuple[float, float]:
    """Return (forward, backward) seconds at peak speed, assuming that backward moves twice the bytes."""
    peak, bandwidth = device.flops_of(dtype), device.memory_bandwidth
    return (
        max(facts.forward_flops / peak, facts.traffic_bytes / bandwidth),
        # Backward reads what forward read and the incoming gradients, and writes as many gradients: twice the
        # traffic, as an approximation. Its FLOP are counted, because they differ by operator.
        max(facts.backward_flops / peak, 2.0 * facts.traffic_bytes / bandwidth),
    )


@dataclass(frozen=True)
class Sample:
    """A timed workload: its cost class, and its (forward, backward) seconds at peak speed and as measured."""

    key: str
    cls: str
    ideal: tuple[float, float]
    measured: tuple[float, float]


def description(work: Workload, facts: Facts, device: DeviceKind) -> dict[str, Any]:
    """Return what is stored beside a workload's timing, to fit efficiencies: cost class, (forward, backward)
    seconds at peak speed, device."""
    return {
        "class": class_of(work),
        "ideal_s": list(ideal_s(device, work.dtype, facts)),
        "device": device.name,
        "device_type": device.type,
    }


def samples_of(records: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[Sample, ...]:
    """Return the successful timings among records of the profile store, for the fit of efficiencies."""
    return tuple(
        Sample(key, str(r["class"]), tuple(r["ideal_s"]), (float(r["forward_s"]), float(r["backward_s"])))
        for key, r in records
        if "class" in r and "error" not in r
    )


@dataclass(frozen=True)
class _EfficiencyCurve:
    """A curve of log10 efficiency (ideal / measured) over log10 ideal seconds, flat outside its knots."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def seconds(self, ideal: float) -> float:
        """Return the predicted duration of work that takes ``ideal`` > 0 seconds at peak speed."""
        # numpy.interp is flat outside the knots: an extrapolated line could promise efficiencies above 1.
        at = float(np.interp(math.log10(ideal), self.sizes, self.values))
        return ideal / 10**at


@dataclass(frozen=True)
class _FitError:
    """The relative errors of a curve, from cross-validation."""

    cls: str
    direction: str
    samples: int
    median: float
    ninth_decile: float


@dataclass(frozen=True)
class Efficiencies:
    """Efficiency curves (share of peak speed) by (cost class, direction), with the errors of their fits."""

    curves: Mapping[tuple[str, str], _EfficiencyCurve]
    errors: tuple[_FitError, ...] = ()

    def seconds(self, cls: str, direction: str, ideal: float) -> float | None:
        """Return the duration of work that takes ``ideal`` seconds at peak speed; None without a curve."""
        curve = self.curves.get((cls, direction))
        if curve is None:
            return None
        return curve.seconds(ideal) if ideal > 0 else 0.0


NO_EFFICIENCIES = Efficiencies({})


def fit_efficiencies(samples: Sequence[Sample]) -> Efficiencies:
    """Fit a curve per cost class and direction; find its error by five-fold cross-validation."""
    by: dict[tuple[str, str], list[tuple[str, float, float]]] = defaultdict(list)
    for sample in samples:
        for direction, ideal, measured in zip(_DIRECTIONS, sample.ideal, sample.measured, strict=True):
            # Logarithms need both to be positive; the backward of an operator without a gradient measures 0.
            if ideal > 0 and measured > 0:
                by[sample.cls, direction].append((sample.key, ideal, measured))
    curves, errors = {}, []
    for (cls, direction), found in sorted(by.items()):
        if len(found) < _FEWEST_SAMPLES:
            continue
        curves[cls, direction] = _curve(found)
        missed = _left_out(found)
        errors.append(
            _FitError(cls, direction, len(found), statistics.median(missed), float(np.quantile(missed, 0.9)))
        )
    return Efficiencies(curves, tuple(errors))


def fit_errors(
    records: Iterable[tuple[str, Mapping[str, Any]]],
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    by: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for key, record in records:
        if "device_type" in record:
            mode = "train" if "/train/" in key else "inference"
            by[record["device_type"], mode].append((key, record))
    return {
        kind: [asdict(error) for error in fit_efficiencies(samples_of(found)).errors]
        for kind, found in sorted(by.items())
    }


def _curve(found: Sequence[tuple[str, float, float]]) -> _EfficiencyCurve:
    # Efficiencies span orders of magnitude between launch-bound and large work, so both axes are logarithmic,
    # and medians ignore the few timings that another process disturbed.
    ordered = sorted((math.log10(ideal), math.log10(ideal / measured)) for _, ideal, measured in found)
    # At most twelve knots, an assumption: more would follow the noise of neighbouring sizes.
    knots = max(1, min(12, len(ordered) // _SAMPLES_PER_KNOT))
    sizes, values = [], []
    for part in np.array_split(np.array(ordered), knots):
        sizes.append(float(np.median(part[:, 0])))
        values.append(float(np.median(part[:, 1])))
    return _EfficiencyCurve(tuple(sizes), tuple(values))


def _left_out(found: Sequence[tuple[str, float, float]]) -> list[float]:
    # Not hash(): Python salts it in each process, and the error would differ from run to run.
    folds: list[list[tuple[str, float, float]]] = [[] for _ in range(_FOLDS)]
    for sample in found:
        folds[zlib.crc32(sample[0].encode()) % _FOLDS].append(sample)
    missed = []
    for number, left_out in enumerate(folds):
        if rest := [sample for fold in (*folds[:number], *folds[number + 1 :]) for sample in fold]:
            curve = _curve(rest)
            missed += [abs(curve.seconds(ideal) / measured - 1) for _, ideal, measured in left_out]
    return missed or [float("inf")]


def _weight_gradient_share(facts: Facts) -> float:
    """Return an estimate, somewhat too large, of the weight gradient's share of backward: half of the first
    (linear) call's share of the FLOP."""
    if not facts.work_of_calls or not facts.forward_flops:
        return 0.5
    return facts.work_of_calls[0].forward_flops / facts.forward_flops / 2


_PYTORCHS_OWN = KernelSettings()
_TF32_BY = {
    CostClass.MATRIX: "matmul",
    CostClass.ATTENTION: "matmul",
    CostClass.CONVOLUTION: "convolution",
    CostClass.RECURRENT: "recurrent",
}
"""Cost class -> the setting of PyTorch that allows TF32 for float32."""


_FUSED = (CostClass.ELEMENT_WISE, CostClass.NORM)
"""Cost classes whose neighbouring operators become one kernel if fused."""


def moved_bytes(cls: CostClass, of: CallWork) -> int:
    """Return the bytes that a call reads and writes on a GPU, where a norm is one kernel."""
    return of.outer_bytes if cls is CostClass.NORM else of.traffic_bytes


@dataclass(eq=False, repr=False)
class RooflineCompute:
    """Estimated durations: seconds at peak speed, divided by efficiencies, plus kernel launches.

    Args:
        efficiencies: fitted efficiencies; cost classes without a fit use constants.
        kernels: PyTorch's settings, TF32 among them.
        fused: whether neighbouring element-wise operators and norms are one GPU kernel.
        dated: the month, such as ``2024-03``, from which the kernels are; by default the newest.
    """

    device: DeviceKind
    optimizer: str
    efficiencies: Efficiencies = NO_EFFICIENCIES
    kernels: KernelSettings = _PYTORCHS_OWN
    _: KW_ONLY
    fused: bool = False
    dated: str = ""

    def __post_init__(self) -> None:
        self.reached = reached_by(self.device, self.dated, compiled=self.fused)
        self.host = host_seconds(self.device.type)
        self._kernel_s = self.host.kernel_s if self.host else _LAUNCH_S

    def source_of(self, work: Workload) -> str:
        """Return ``fitted`` if the cost class has forward and backward curves, else ``data sheet``."""
        cls = class_of(work)
        covered = all((cls, direction) in self.efficiencies.curves for direction in _DIRECTIONS)
        return FITTED if covered else DATA_SHEET

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        cls, kernels = class_of(work), _kernels_of(work)
        if self._counts_calls(work, facts):
            return self._by_call(work, facts)
        found = []
        for direction, ideal, flops, traffic, count in zip(
            _DIRECTIONS,
            ideal_s(self.device, work.dtype, facts),
            (facts.forward_flops, facts.backward_flops),
            (facts.traffic_bytes, 2.0 * facts.traffic_bytes),
            # Backward launches about two kernels for each of forward's: one gradient per operand.
            (kernels, 2 * kernels),
            strict=True,
        ):
            # Work without a kernel (views alone) takes no time, which no curve of its class expresses.
            fitted = self.efficiencies.seconds(cls, direction, ideal) if kernels else None
            peak = peak_flops(self.device, self.kernels, work.dtype, CostClass(cls))
            found.append(self._fixed(peak, flops, traffic, count) if fitted is None else fitted)
        return found[0], found[1] if work.has_backward else 0.0

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        if self.host is None:
            return 0.0, 0.0
        calls = _kernels_of(work)
        return calls * self.host.forward_call_s, calls * self.host.backward_call_s * work.has_backward

    def _counts_calls(self, work: Workload, facts: Facts) -> bool:
        # On CPU ranks, figures that are not fitted stay as they were: nobody has compared them call by call.
        return self.device.type == "cuda" and bool(facts.work_of_calls) and self.source_of(work) == DATA_SHEET

    def _by_call(self, work: Workload, facts: Facts) -> tuple[float, float]:
        forward_s = backward_s = 0.0
        for cls, of in self.kernels_of(work, facts):
            there_s, back_s = self._of_call(work.dtype, cls, of, facts)
            forward_s += there_s + self._kernel_s
            # Two launches, as in seconds().
            backward_s += back_s + 2 * self._kernel_s
        return forward_s, backward_s if work.has_backward else 0.0

    def kernels_of(self, work: Workload, facts: Facts) -> Iterator[tuple[CostClass, CallWork]]:
        calls = zip(work.calls, facts.work_of_calls, strict=True)
        kernels = [(_call_class(call), of) for (call, _), of in calls if launches(call.function)]
        for fused, chain in itertools.groupby(kernels, key=lambda kernel: self.fused and kernel[0] in _FUSED):
            if not fused:
                yield from chain
                continue
            # One kernel, which moves the bytes of the largest call.
            merged = list(chain)
            size = max(moved_bytes(cls, of) for cls, of in merged)
            yield CostClass.ELEMENT_WISE, CallWork(sum(of.forward_flops for _, of in merged), size, size)

    def _of_call(self, dtype: str, cls: CostClass, of: CallWork, facts: Facts) -> tuple[float, float]:
        reached = self.reached
        bandwidth = self.device.memory_bandwidth * reached.memory
        traffic = moved_bytes(cls, of)
        # Backward's FLOP are known only for the whole group: products and attention take their shares of
        # them.
        share = of.forward_flops / facts.forward_flops if facts.forward_flops else 0.0
        rate = peak_flops(self.device, self.kernels, dtype, cls) * reached.of(cls)
        # Twice the traffic, as in ideal_s().
        back_s = max(share * facts.backward_flops / rate, 2.0 * traffic / bandwidth)
        return max(of.forward_flops / rate, traffic / bandwidth), back_s

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        """Return the seconds of computing a weight's gradient: half of its call's backward, plus a launch."""
        if not self._counts_calls(work, facts):
            return self.seconds(work, facts)[1] * _weight_gradient_share(facts)
        (call, _), of = work.calls[0], facts.work_of_calls[0]
        return self._of_call(work.dtype, _call_class(call), of, facts)[1] / 2 + self._kernel_s

    def _fixed(self, peak: float, flops: float, traffic: float, launches: int) -> float:
        arithmetic = flops / (peak * ASSUMED.arithmetic)
        memory = traffic / (self.device.memory_bandwidth * ASSUMED.memory)
        # A fitted efficiency includes the launches, because small work never reaches full speed; a fixed one
        # does not.
        return max(arithmetic, memory) + launches * self._kernel_s

    @property
    def optimizer_s_per_element(self) -> float:
        """The optimizer's duration per float32 element in seconds, limited by memory bandwidth."""
        return 4.0 * kind_of(self.optimizer).traffic / (self.device.memory_bandwidth * self.reached.memory)


def measurement_prefix(
    ranks: int, threads: int, training: bool, device: str | None = None, kernels: KernelSettings | None = None
) -> str:
    """Return the first part of a workload's key in the store, which names hardware and method of timing.

    Args:
        device: the name of a kind of GPU; None for this machine's processor.
        kernels: PyTorch's settings; its defaults if None.
    """
    settings = (kernels or KernelSettings()).of("cuda" if device else "cpu").words
    mode = "train" if training else "inference"
    # How each one is timed: tensoropt.ranks.worker, tensoropt.profiling.timers.
    on = f"{device}/host-ahead,own-start" if device else f"{processor_name()}/copies,nodes,smallest"
    if settings:
        on += f"/{settings}"
    return f"{on}/torch-{torch.__version__}/{ranks}x{threads}/{mode}"


def failed_otherwise(record: Mapping[str, Any]) -> bool:
    """Return whether timing failed for another reason than lack of memory, such as unsuitable operands."""
    return "error" in record and not record["error"].startswith(OUT_OF_MEMORY)


@dataclass(eq=False, repr=False)
class MeasuredCompute:
    """Durations from records of :func:`tensoropt.profiling.measure.measure_workloads`, by workload key.

    Args:
        rest: estimates for workloads that were not timed; None if all were.
        source: the source of the optimizer's duration: measured, fitted or data sheet.
        factors: cost class -> duration in real steps over duration when timed alone; by default 1.
        peaks: dtype (others use float32's) -> peak FLOP/s that no duration may beat; empty for no limit.
    """

    records: Mapping[str, Mapping[str, Any]]
    optimizer_s_per_element: float
    rest: RooflineCompute | None = None
    _: KW_ONLY
    source: str = MEASURED
    factors: Mapping[str, float] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)

    def _record(self, work: Workload) -> Mapping[str, Any] | None:
        record = self.records.get(work.key)
        return None if record is None or failed_otherwise(record) else record

    def source_of(self, work: Workload) -> str:
        if self.rest is not None and self._record(work) is None:
            return self.rest.source_of(work)
        return MEASURED

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """Return a workload's (forward, backward) seconds; infinite if it ran out of memory."""
        forward_s, backward_s = self._alone(work, facts)
        return (
            self._in_step(work, forward_s, facts.forward_flops),
            self._in_step(work, backward_s, facts.backward_flops),
        )

    def _in_step(self, work: Workload, seconds: float, flops: float) -> float:
        if self.factors:
            seconds *= self.factors.get(class_of(work), 1.0)
        return (
            max(seconds, flops / self.peaks.get(work.dtype, self.peaks["float32"])) if self.peaks else seconds
        )

    def _alone(self, work: Workload, facts: Facts) -> tuple[float, float]:
        record = self._record(work)
        if record is None:
            if self.rest is not None:
                return self.rest.seconds(work, facts)
            raise MeasurementError(f"{work.describe()} was not measured; run explore again")
        # Too little memory: infinite seconds tell the search that it is impossible, so no table needs a
        # special case.
        if "error" in record:
            return float("inf"), float("inf")
        return float(record["forward_s"]), float(record["backward_s"])

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        record = self._record(work)
        if record is None:
            return (0.0, 0.0) if self.rest is None else self.rest.host_seconds(work)
        return float(record.get("forward_host_s", 0.0)), float(record.get("backward_host_s", 0.0))

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        share = _weight_gradient_share(facts)
        if self._record(work) is None and self.rest is not None:
            seconds = self.rest.weight_gradient_s(work, facts)
        else:
            seconds = self._alone(work, facts)[1] * share
        return self._in_step(work, seconds, facts.backward_flops * share if self.peaks else 0.0)


class SlowestCompute:
    """Durations on devices of several kinds: each operator runs at the pace of its slowest kind."""

    def __init__(self, kinds: Sequence[MeasuredCompute]):
        self.kinds = tuple(kinds)
        slowest = max(kinds, key=lambda kind: kind.optimizer_s_per_element)
        self.source, self.optimizer_s_per_element = slowest.source, slowest.optimizer_s_per_element

    def source_of(self, work: Workload) -> str:
        """Return the least trusted of all kinds' sources (measured, fitted or data sheet)."""
        # SOURCES is ordered from the most to the least trusted, so the largest index is the least trusted.
        return max((kind.source_of(work) for kind in self.kinds), key=SOURCES.index)

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """Return (forward, backward) seconds, each on the kind of device that is slowest at it."""
        forward, backward = zip(*(kind.seconds(work, facts) for kind in self.kinds), strict=True)
        # Forward and backward have separate maxima: the kind that is slowest in forward need not be the
        # slowest in backward.
        return max(forward), max(backward)

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        slowest = max(self.kinds, key=lambda kind: kind.seconds(work, facts)[1])
        return slowest.weight_gradient_s(work, facts)

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        """Return (forward, backward) seconds for launching kernels, each on the slowest kind's host."""
        forward, backward = zip(*(kind.host_seconds(work) for kind in self.kinds), strict=True)
        return max(forward), max(backward)
