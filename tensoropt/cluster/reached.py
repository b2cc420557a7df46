"""The shares of a data sheet's peaks that kernels reach, from ``presets/efficiencies.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tensoropt.cluster.catalog import efficiency_figures
from tensoropt.cluster.devices import DeviceKind
from tensoropt.cluster.hardware import Cluster


@dataclass(frozen=True, slots=True)
class Reached:
    """The shares of its peaks that a device kind reaches, each between 0 and 1.

    Attributes:
        arithmetic: share of the FLOP/s, for operators of classes that ``classes`` does not name.
        memory: share of the memory bandwidth.
        classes: share of the FLOP/s, by operator class (:class:`tensoropt.ops.spec.CostClass`).
        source: the source of the figures.
        slower_beside: how much longer, as a share, computing takes while a collective runs at the same time.
    """

    arithmetic: float
    memory: float
    classes: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: str = ""
    slower_beside: float = 0.0

    @property
    def words(self) -> str:
        """The shares as text for people."""
        of_class = ", ".join(f"{share:.0%} in {name}" for name, share in self.classes.items())
        rates = f"{of_class}, {self.arithmetic:.0%} in others" if of_class else f"{self.arithmetic:.0%}"
        bandwidth = f"{self.memory:.0%} of the memory bandwidth"
        return f"of the FLOP/s {rates}, and {bandwidth} ({self.source})"

    def of(self, cls: str) -> float:
        """The share of the FLOP/s that operators of a class reach."""
        return self.classes.get(cls, self.arithmetic)


@cache
def _reached(capability: str, dated: str) -> Reached:
    figures = efficiency_figures()
    # Oldest first; the newest has no end date.
    kernels = next(of for of in figures["kernels"] if "until" not in of or (dated and dated <= of["until"]))
    return Reached(**{**figures["assumed"], **kernels["capability"].get(capability, {})})


ASSUMED = _reached("", "")
"""The shares assumed if nothing is known of the device."""


def reached_by(device: DeviceKind, dated: str = "") -> Reached:
    """The shares that kernels reach on a device kind. GPUs of the same compute capability are assumed to
    reach the same shares of their own peaks; nothing is known of CPU cores.

    Args:
        dated: the month of the kernels (``2024-03``, optionally followed by a day); by default the newest.
    """
    return _reached(device.capability, dated) if device.type == "cuda" else ASSUMED


def slower_beside(cluster: Cluster) -> float:
    """How much longer, as a share, computing takes while collectives run at the same time, on the device kind
    where that is largest; 0 if there is no slow-down."""
    return (
        max(reached_by(kind).slower_beside for kind in cluster.devices)
        if cluster.device_type == "cuda"
        else 0.0
    )
