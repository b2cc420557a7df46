"""The rates of a point: samples and tokens per second, MFU, device-hours and cost.

They are computed from the point's step time, the step's samples, tokens and FLOP, and the devices with their
prices. Unknown values are None with a reason in words, never guesses. Users give the length of a training
(:class:`Amount`) and prices (:class:`Tariff`); the cluster is the one saved with the plan or exploration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.cluster.hardware import DeviceKind
from tensoropt.errors import ClusterError, TensorOptError, suggest
from tensoropt.plan.findings import Findings
from tensoropt.units import parse_count, read_number

_MODEL_FLOPS = "model_flops"
"""The report's key for FLOP by number format (:mod:`tensoropt.evaluation.problem`)."""
_PEAK_FLOPS = "peak_flops"
"""The report's key for the measured peak FLOP/s of CPU ranks (:mod:`tensoropt.profiling.peak`)."""
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class StepWork:
    """The amount of data and computation in one step of a model.

    Attributes:
        samples, tokens: number of samples and tokens in the global batch; None if unknown.
        flops: the model's FLOP by number format, such as ``bfloat16``.
        whys: the reason for each attribute that is None, by attribute name.
    """

    samples: int | None
    tokens: int | None
    flops: Mapping[str, float]
    whys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, findings: Findings) -> StepWork:
        """Return the samples, tokens and FLOP of one step of an exploration's model."""
        inputs = list(_inputs(findings))
        samples, no_samples = _samples(findings, inputs)
        tokens, no_tokens = _tokens(findings, inputs, samples)
        whys = _whys(samples=no_samples, tokens=no_tokens)
        return cls(samples, tokens, findings.report.get(_MODEL_FLOPS, {}), whys)


def _whys(**reasons: str) -> dict[str, str]:
    return {name: why for name, why in reasons.items() if why}


def _inputs(findings: Findings) -> Iterator[tuple[str, tuple[int, ...], str]]:
    if findings.graph_facts is not None:
        yield from findings.graph_facts.inputs
        return
    call: Mapping[str, Any] = findings.model.call or {}
    named = [*enumerate(call.get("args", ())), *call.get("kwargs", {}).items()]
    for name, value in named:
        if isinstance(value, Mapping) and "tensor" in value:
            yield str(name), tuple(value["tensor"]), str(value["dtype"])


def _samples(findings: Findings, inputs: list[tuple[str, tuple[int, ...], str]]) -> tuple[int | None, str]:
    sizes = list(dict.fromkeys(shape[0] for _, shape, _ in inputs if shape))
    if len(sizes) == 1 and sizes[0] > 0:
        return sizes[0], ""
    if findings.model.batch:  # the batch that the command line gave a zoo model
        return findings.model.batch, ""
    if not sizes:
        return None, "the shapes of the model's inputs were not saved"
    return None, f"the model's inputs have no batch size in common (first sizes {', '.join(map(str, sizes))})"


def _tokens(
    findings: Findings, inputs: list[tuple[str, tuple[int, ...], str]], samples: int | None
) -> tuple[int | None, str]:
    """Return the number of tokens in a step (indices that an embedding looks up), or None with the reason."""
    graph = findings.graph_facts
    read = {"input_ids"} if graph is None else graph.looked_up
    numbers = (shape for name, shape, dtype in inputs if dtype in _INTEGERS and name in read)
    lengths = list(dict.fromkeys(shape[1] for shape in numbers if len(shape) == 2 and shape[0] == samples))
    if len(lengths) == 1 and samples:
        return samples * lengths[0], ""
    if lengths:
        return None, f"inputs are sequences of {' and '.join(map(str, lengths))} tokens; use samples instead"
    return None, "the model has no input of token indices; use samples instead"


AMOUNTS = ("steps", "samples", "tokens")


@dataclass(frozen=True)
class Tariff:
    """The prices of devices per hour. ``by_kind`` has prices of single device kinds, ``price`` is that of all
    other devices; without either, the cluster's own prices count.

    Raises:
        TensorOptError: a price is not positive.
    """

    price: float | None = None
    by_kind: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, price in (("all devices", self.price), *self.by_kind.items()):
            if price is not None and not (math.isfinite(price) and price > 0):
                raise TensorOptError(f"the price of {name} is {price:g} per hour; give more than 0")

    def of(self, kind: DeviceKind) -> float | None:
        """Return the price per hour of one device of this kind; None if unknown."""
        said = self.by_kind.get(kind.name, self.price)
        return kind.price_per_hour if said is None else said

    def check(self, kinds: Iterable[str]) -> None:
        """Raise :class:`TensorOptError` if a price is given for a device kind that is not among ``kinds``."""
        known = dict.fromkeys(kinds)
        for name in self.by_kind:
            if name not in known:
                raise TensorOptError(
                    f"price given for {name}, which is no device of the cluster; {suggest(name, known)}"
                )


CLUSTERS_OWN = Tariff()


def prices_of(text: str) -> tuple[float | None, dict[str, float]]:
    """Return (price of all devices, prices by kind) from ``2.5``, ``H100-80GB=2.5, A100-80GB=1.6`` or both.

    Raises:
        TensorOptError: a price is not a number, or a device kind has two prices.
    """
    everywhere: float | None = None
    by_kind: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, number = part.rpartition("=")
        kind = kind.strip()
        try:
            price = read_number(number)
        except TensorOptError:
            raise TensorOptError(
                f"'{part}' is not a price; write 2.5 for all devices or H100-80GB=2.5 for a kind of them"
            ) from None
        if kind in by_kind or (not kind and everywhere is not None):
            raise TensorOptError(f"there are two prices for {kind or 'all devices'}; give one")
        if kind:
            by_kind[kind] = price
        else:
            everywhere = price
    return everywhere, by_kind


@dataclass(frozen=True)
class Amount:
    """The length of a training, as a number of steps, samples or tokens.

    Attributes:
        unit: ``steps``, ``samples`` or ``tokens``.

    Raises:
        TensorOptError: the unit is unknown, or the count is not positive.
    """

    count: float
    unit: str = "steps"

    def __post_init__(self) -> None:
        if self.unit not in AMOUNTS:
            raise TensorOptError(f"'{self.unit}' is not a unit of training; use one of {', '.join(AMOUNTS)}")
        if not (math.isfinite(self.count) and self.count > 0):
            raise TensorOptError(f"the length of a training is {self.count:g} {self.unit}; give more than 0")

    def steps(self, work: StepWork) -> float:
        """Return the length in steps, possibly a fraction.

        Raises:
            TensorOptError: the length is in samples or tokens, whose number per step is unknown.
        """
        if self.unit == "steps":
            return self.count
        per_step = work.tokens if self.unit == "tokens" else work.samples
        if per_step is None:
            raise TensorOptError(f"{self.unit} of a step are unknown: {work.whys[self.unit]}")
        return self.count / per_step

    @property
    def words(self) -> str:
        """The length in words: ``1,000 steps``, ``300B tokens``."""
        return f"{_count(self.count)} {self.unit[:-1] if self.count == 1 else self.unit}"


THOUSAND_STEPS = Amount(1000.0)


_AMOUNT = re.compile(r"(\S+)\s*(steps?|samples?|tokens?)")


def amount_of(text: str) -> Amount | None:
    """Return the length of a training from a text such as ``1e9 tokens`` or ``50000 samples``; None for "".

    Raises:
        TensorOptError: the text is not a number followed by steps, samples or tokens.
    """
    if not text.strip():
        return None
    match = _AMOUNT.fullmatch(text.strip().lower())
    if match is None:
        raise TensorOptError(
            f"'{text.strip()[:60]}' is not an amount of training; write 1e9 tokens or 50000 samples"
        )
    count, unit = match.groups()
    return Amount(parse_count(count), unit.rstrip("s") + "s")


def _count(value: float) -> str:
    if value < 1e8:
        return f"{value:,.12g}"
    letter, unit = next((one for one in (("T", 1e12), ("B", 1e9)) if value >= one[1]), ("M", 1e6))
    return f"{value / unit:,.6g}{letter}"


def made_for(cluster: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster saved with a plan or exploration; None if it is missing or unreadable."""
    try:
        return Cluster.from_dict(cluster)
    except ClusterError:
        return None


def for_gpus(cluster: Mapping[str, Any]) -> bool:
    """Return whether the cluster saved with a plan or exploration has GPUs; False if it cannot be read."""
    hardware = made_for(cluster)
    return hardware is not None and hardware.device_type == "cuda"


def device_words(cluster: Cluster) -> str:
    """Return ``2 x H100-80GB (cuda)``: the number of devices, their kinds and their type."""
    if len(cluster.device_types) > 1:
        return f"{cluster.counts} ({' and '.join(cluster.device_types)})"
    kinds = " or ".join(dict.fromkeys(kind.name for kind in cluster.devices))
    return f"{cluster.device_count} x {kinds} ({cluster.device_type})"


HOUR_S = 3600.0


@dataclass(frozen=True)
class Rates:
    """The speed, efficiency and price of one point's step.

    Attributes:
        step_s: duration of a step in seconds.
        devices: the number of devices.
        samples_per_s, tokens_per_s: samples and tokens per second of all devices; None if unknown.
        flops_per_s: the model's FLOP per second, of all devices.
        mfu: model FLOPs utilisation (PaLM, appendix B): the share of the step that the model's FLOP would
            take at the devices' peak FLOP/s.
        per_hour: price of all devices per hour.
        whys: the reason for each attribute that is None, by attribute name.
    """

    step_s: float
    devices: int
    samples_per_s: float | None
    tokens_per_s: float | None
    flops_per_s: float
    mfu: float | None
    per_hour: float | None
    whys: Mapping[str, str] = field(default_factory=dict)

    def hours(self, steps: float) -> float:
        """Return the duration of this many steps in hours."""
        return steps * self.step_s / HOUR_S

    def device_hours(self, steps: float) -> float:
        """Return the device-hours of this many steps: hours times devices."""
        return self.hours(steps) * self.devices

    def cost(self, steps: float) -> float | None:
        """Return the cost of this many steps; None if the price is unknown."""
        return None if self.per_hour is None else self.hours(steps) * self.per_hour


class RatesOf:
    """The speed, efficiency and price of each point of an exploration.

    Args:
        tariff: device prices that replace the cluster's.
    """

    def __init__(self, findings: Findings, tariff: Tariff = CLUSTERS_OWN):
        self.findings, self.tariff = findings, tariff
        self.work = StepWork.of(findings)
        self.cluster = made_for(findings.cluster)
        self._on_devices = cache(self._of_devices)

    def of(self, index: int) -> Rates:
        """Return the speed, efficiency and price of point ``index`` of ``all_points``."""
        point, work = self.findings.all_points[index], self.work
        devices, step_s = self.findings.spaces[point.space].devices, point.time_s
        ideal_s, per_hour, whys = self._on_devices(devices)
        return Rates(
            step_s,
            devices,
            samples_per_s=None if work.samples is None else work.samples / step_s,
            tokens_per_s=None if work.tokens is None else work.tokens / step_s,
            flops_per_s=sum(work.flops.values()) / step_s,
            mfu=None if ideal_s is None else ideal_s / step_s,
            per_hour=per_hour,
            whys={**{f"{name}_per_s": why for name, why in work.whys.items()}, **whys},
        )

    def _of_devices(self, count: int) -> tuple[float | None, float | None, dict[str, str]]:
        """Return (seconds of the model's FLOP at peak, price per hour, reasons for unknowns) of ``count``
        devices."""
        kinds, why = _kinds(self.cluster, count)
        if kinds is None:
            return None, None, {"mfu": why, "per_hour": why}
        ideal_s, no_mfu = self._ideal_s(kinds)
        prices = [self.tariff.of(kind) for kind in kinds]
        unknown = dict.fromkeys(kind.name for kind, price in zip(kinds, prices, strict=True) if price is None)
        no_price = f"no price of a device-hour is known for {', '.join(unknown)}" if unknown else ""
        per_hour = None if unknown else float(sum(p for p in prices if p is not None))
        return ideal_s, per_hour, _whys(mfu=no_mfu, per_hour=no_price)

    def _ideal_s(self, kinds: tuple[DeviceKind, ...]) -> tuple[float | None, str]:
        if not self.work.flops:
            return None, "the model has no operator whose FLOP count for MFU, such as a matrix product"
        seconds, measured = 0.0, self.findings.report.get(_PEAK_FLOPS) or {}
        for name, flops in self.work.flops.items():
            peaks = [measured.get(name) or _peak(kind, name) for kind in kinds]
            lacking = dict.fromkeys(k.name for k, peak in zip(kinds, peaks, strict=True) if peak is None)
            if lacking:
                return None, f"no peak of {name} is known for {', '.join(lacking)}"
            seconds += flops / sum(peak for peak in peaks if peak is not None)
        return seconds, ""


def kinds_of(findings: Findings) -> tuple[str, ...]:
    """Return the names of the device kinds of an exploration's cluster."""
    return tuple(str(kind["name"]) for kind in findings.cluster.get("kinds", ()))


def _peak(kind: DeviceKind, name: str) -> float | None:
    # Devices without TF32 tensor cores compute in float32.
    return kind.flops.get(name, kind.flops["float32"] if name == "tf32" else None)


def _kinds(cluster: Cluster | None, count: int) -> tuple[tuple[DeviceKind, ...] | None, str]:
    """Return the kind of each device of a plan on ``count`` devices, or None with the reason."""
    if cluster is None:
        return None, "its cluster was not saved"
    if count == cluster.device_count:
        return cluster.devices, ""
    if count < cluster.device_count and len(cluster.device_kinds) == 1:
        return cluster.devices[:count], ""
    return None, f"it is unknown which of the {cluster.device_count} devices the plan uses"
