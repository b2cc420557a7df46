"""The parts of a cluster: device kinds, and the links between pairs of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tensoropt.cluster.quantities import BANDWIDTH, FLOPS, LATENCY, MEMORY, positive
from tensoropt.errors import ClusterError, suggest

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        type: PyTorch's device type, ``cpu`` or ``cuda``.
        memory_bytes: the memory that one rank may use.
        flops: peak dense FLOP/s per dtype name (``float32``, ``bfloat16``, … and ``tf32``).
        memory_bandwidth: bytes/second.
        price_per_hour: price of one device, in any currency; None if unknown.
        source: where the figures come from.
        capability: CUDA's compute capability, such as ``9.0`` for an H100; empty if there is none or it is
            unknown.
    """

    name: str
    type: str
    memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    price_per_hour: float | None = None
    source: str = ""
    capability: str = ""

    def __post_init__(self) -> None:
        if self.capability and not all(part.isdecimal() for part in self.capability.split(".", 1)):
            raise ClusterError(
                f"device kind '{self.name}' has the compute capability '{self.capability}'; write it as '9.0'"
            )
        if self.type not in DEVICE_TYPES:
            # The names that people type for a GPU are spelled more like cpu.
            meant = "cuda" if str(self.type).lower() in ("gpu", "nvidia", "rocm", "hip") else self.type
            raise ClusterError(
                f"device kind '{self.name}' has type '{self.type}'; {suggest(meant, DEVICE_TYPES)}"
            )
        MEMORY.read(self.memory_bytes, f"memory of device kind '{self.name}'")
        BANDWIDTH.read(self.memory_bandwidth, f"memory bandwidth of device kind '{self.name}'")
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise ClusterError(
                f"device kind '{self.name}' must give flops for float32 at least,"
                " for example {float32: 15.7e12}"
            )
        checked = {
            str(dtype): FLOPS.read(value, f"{dtype} FLOP/s of device kind '{self.name}'")
            for dtype, value in self.flops.items()
        }
        # Frozen like the rest: all callers share the mapping of a catalogue kind.
        object.__setattr__(self, "flops", MappingProxyType(checked))
        if self.price_per_hour is not None:
            object.__setattr__(
                self,
                "price_per_hour",
                positive(self.price_per_hour, f"price per hour of device kind '{self.name}'"),
            )

    def flops_of(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype (with or without the ``torch.`` prefix); float32's if the table lacks
        it."""
        # Assumption: a dtype that is not listed is computed as fast as float32.
        return self.flops.get(dtype.removeprefix("torch."), self.flops["float32"])

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {
            "name": self.name,
            "type": self.type,
            "memory_bytes": self.memory_bytes,
            "flops": dict(self.flops),
            "memory_bandwidth": self.memory_bandwidth,
            "price_per_hour": self.price_per_hour,
            "source": self.source,
            # Left out if empty, so that files saved for CPU ranks do not change.
            **({"capability": self.capability} if self.capability else {}),
        }

    def __reduce__(self) -> tuple:  # a mapping proxy cannot be pickled
        return _rebuild_kind, (self.to_dict(),)


def _rebuild_kind(data: dict[str, Any]) -> DeviceKind:
    return DeviceKind(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """``t = latency_s + bytes / bandwidth_bytes_per_s`` per hop, each direction at once.

    ``dedicated`` marks a wire between just two devices (NVLink without a switch): a device can use
    all of its dedicated wires at the same time.
    """

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = ""
    dedicated: bool = False

    def __post_init__(self) -> None:
        LATENCY.read(self.latency_s, f"latency of link '{self.name}'")
        BANDWIDTH.read(self.bandwidth_bytes_per_s, f"bandwidth of link '{self.name}'")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {name: getattr(self, name) for name in self.__slots__}
