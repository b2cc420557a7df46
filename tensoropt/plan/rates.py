"""The units in which people decide: samples and tokens per second, MFU, device-hours and money.

All of them follow from a point's seconds per step and what a step is: how many samples and tokens it reads,
how many FLOP its model has, on which devices it runs and what these cost. What is not known is None, with the
reason in words; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensoropt.cluster import Cluster
from tensoropt.cluster.devices import DeviceKind
from tensoropt.plan.amounts import CLUSTERS_OWN, Tariff
from tensoropt.plan.findings import Findings
from tensoropt.plan.made_for import made_for
from tensoropt.plan.step_work import StepWork

HOUR_S = 3600.0


@dataclass(frozen=True)
class Rates:
    """One point in these units.

    Attributes:
        step_s: seconds of a step.
        devices: how many it runs on.
        samples_per_s, tokens_per_s: of all devices together; None where unknown.
        flops_per_s: FLOP of the model per second, of all devices together.
        mfu: model FLOPs utilisation: the share of a step that its model's FLOP would take if every device
            computed them at the peak of the format of their numbers (PaLM, appendix B).
        per_hour: money for an hour of all devices.
        whys: by the name of an attribute that is None, why.
    """

    step_s: float
    devices: int
    samples_per_s: float | None
    tokens_per_s: float | None
    flops_per_s: float | None
    mfu: float | None
    per_hour: float | None
    whys: Mapping[str, str] = field(default_factory=dict)

    def hours(self, steps: float) -> float:
        """Hours that so many steps take."""
        return steps * self.step_s / HOUR_S

    def device_hours(self, steps: float) -> float:
        """Hours of all devices added up."""
        return self.hours(steps) * self.devices

    def cost(self, steps: float) -> float | None:
        """Money for so many steps; None where the price is unknown."""
        return None if self.per_hour is None else self.hours(steps) * self.per_hour


class RatesOf:
    """The rates of an exploration's points.

    Args:
        tariff: prices that replace those of the cluster.
    """

    def __init__(self, found: Findings, tariff: Tariff = CLUSTERS_OWN):
        self.found, self.tariff = found, tariff
        self.work = StepWork.of(found)
        self.cluster = made_for(found.cluster)
        self._by_count: dict[int, tuple[float | None, float | None, dict[str, str]]] = {}

    def of(self, index: int) -> Rates:
        """Rates of point ``index`` of ``all_points``."""
        point = self.found.all_points[index]
        devices = math.prod(self.found.spaces[point.space].mesh.shape)
        ideal_s, per_hour, whys = self.of_devices(devices)
        work, seconds = self.work, point.time_s
        flops = None if work.flops is None else sum(work.flops.values()) / seconds
        return Rates(
            step_s=seconds,
            devices=devices,
            samples_per_s=None if work.samples is None else work.samples / seconds,
            tokens_per_s=None if work.tokens is None else work.tokens / seconds,
            flops_per_s=flops,
            mfu=None if ideal_s is None else ideal_s / seconds,
            per_hour=per_hour,
            whys={**{f"{name}_per_s": why for name, why in work.whys.items()}, **whys},
        )

    def of_devices(self, count: int) -> tuple[float | None, float | None, dict[str, str]]:
        """(seconds of a step at peak, money per hour, whys) of plans on so many devices."""
        if count not in self._by_count:
            self._by_count[count] = self._asked_devices(count)
        return self._by_count[count]

    def _asked_devices(self, count: int) -> tuple[float | None, float | None, dict[str, str]]:
        kinds, why = _kinds(self.cluster, count)
        if kinds is None:
            return None, None, {"mfu": why, "per_hour": why}
        whys: dict[str, str] = {}
        ideal_s, why = self._ideal_s(kinds)
        if ideal_s is None:
            whys["mfu"] = why
        prices = [self.tariff.of(kind) for kind in kinds]
        unknown = dict.fromkeys(kind.name for kind, price in zip(kinds, prices, strict=True) if price is None)
        if unknown:
            whys["per_hour"] = f"no price of a device-hour is known for {', '.join(unknown)}"
        return ideal_s, None if unknown else float(sum(p for p in prices if p is not None)), whys

    def _ideal_s(self, kinds: tuple[DeviceKind, ...]) -> tuple[float | None, str]:
        if self.work.flops is None:
            return None, self.work.whys["flops"]
        if not self.work.flops:
            return None, "its model has no product whose FLOP are counted"
        seconds = 0.0
        for name, flops in self.work.flops.items():
            peaks = [_peak(kind, name) for kind in kinds]
            lacking = dict.fromkeys(k.name for k, peak in zip(kinds, peaks, strict=True) if peak is None)
            if lacking:
                return None, f"no peak of {name} is known for {', '.join(lacking)}"
            seconds += flops / sum(peak for peak in peaks if peak is not None)
        return seconds, ""


def kinds_of(found: Findings) -> tuple[str, ...]:
    """The names of the kinds of devices of an exploration's cluster."""
    return tuple(str(kind["name"]) for kind in found.cluster.get("kinds", ()))


def rates(found: Findings, index: int, *, tariff: Tariff = CLUSTERS_OWN) -> Rates:
    """The rates of point ``index`` of ``all_points``: throughput, MFU and what an hour costs.

    Args:
        tariff: prices that replace those of the cluster, and the currency.

    Raises:
        TensorOptError: there is a price for a kind of devices that the cluster does not have.
    """
    tariff.check(kinds_of(found))
    return RatesOf(found, tariff).of(index)


def _peak(kind: DeviceKind, name: str) -> float | None:
    # What has no tensor cores for TF32 computes float32 as it is.
    return kind.flops.get(name, kind.flops["float32"] if name == "tf32" else None)


def _kinds(cluster: Cluster | None, count: int) -> tuple[tuple[DeviceKind, ...] | None, str]:
    """The kinds of the devices that a plan on ``count`` of them has; None and why where that is unknown."""
    if cluster is None:
        return None, "the cluster was not saved with it"
    if count == cluster.device_count:
        return cluster.devices, ""
    if count < cluster.device_count and len(cluster.device_kinds) == 1:
        return cluster.devices[:count], ""
    return None, f"which of the {cluster.device_count} devices the plan is on is not known"
