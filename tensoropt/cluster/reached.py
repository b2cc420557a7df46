"""Shares of a data sheet's peaks that kernels reach, from ``presets/efficiencies.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tensoropt.cluster.catalog import efficiency_figures
from tensoropt.cluster.devices import DeviceKind
from tensoropt.cluster.hardware import Cluster


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares between 0 and 1.

    Attributes:
        arithmetic: of the FLOP/s, by operators of classes that are not named.
        memory: of the memory bandwidth.
        classes: of the FLOP/s, by class of operator (:class:`tensoropt.ops.spec.CostClass`).
        source: where the figures come from.
        slower_beside: how much longer, as a share, computing takes while a collective runs beside it.
    """

    arithmetic: float
    memory: float
    classes: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: str = ""
    slower_beside: float = 0.0

    @property
    def words(self) -> str:
        """The shares, for people."""
        of_class = ", ".join(f"{share:.0%} in {name}" for name, share in self.classes.items())
        rates = f"{of_class}, {self.arithmetic:.0%} in others" if of_class else f"{self.arithmetic:.0%}"
        bandwidth = f"{self.memory:.0%} of the memory bandwidth"
        return f"of the FLOP/s {rates}, and {bandwidth} ({self.source})"

    def of(self, cls: str) -> float:
        """Share of the FLOP/s that operators of a class reach."""
        return self.classes.get(cls, self.arithmetic)


@cache
def _reached(capability: str, dated: str) -> Reached:
    figures = efficiency_figures()
    # The oldest first; the newest has no end.
    kernels = next(of for of in figures["kernels"] if "until" not in of or (dated and dated <= of["until"]))
    return Reached(**{**figures["assumed"], **kernels["capability"].get(capability, {})})


ASSUMED = _reached("", "")
"""Where nothing is known of such devices."""


def reached_by(device: DeviceKind, dated: str = "") -> Reached:
    """What kernels reach on a kind of device: GPUs of one compute capability reach alike shares of their own
    peaks, which is an assumption; of CPU cores nothing is known.

    Args:
        dated: the kernels of which month (``2024-03``, which may go on with a day); by default the newest.
    """
    return _reached(device.capability, dated) if device.type == "cuda" else ASSUMED


def slower_beside(cluster: Cluster) -> float:
    """How much longer, as a share, computing takes while collectives run beside it, on the kind of device
    where that is most; 0 where none do."""
    return (
        max(reached_by(kind).slower_beside for kind in cluster.devices)
        if cluster.device_type == "cuda"
        else 0.0
    )
